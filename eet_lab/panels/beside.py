"""What the workbench asks beside the page: the forecast of the next run, and other planners on the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from eet_lab.bench.foresee import foresee_compare
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled
from eet_lab.models import Model
from eet_lab.monitor import free_bytes_of
from eet_lab.panels import forecast_line, memory_tab
from eet_lab.panels.aside import Answer, Aside
from eet_lab.panels.forecast_line import ForecastLine, Foreseen
from eet_lab.panels.memory_tab import MemoryTab
from eet_lab.panels.state import State
from eet_lab.panels.worker import Feed, Work
from eet_lab.technique import Recipe

Put = Callable[..., None]

MOVED = 0.05
"""The share of free memory that may come or go before a forecast is asked for again."""


class Beside:
    """One thread for both, and who shows its answers. Only the ui thread calls it."""

    def __init__(self, put: Put) -> None:
        self._aside = Aside()
        self.memory = MemoryTab(put, self._aside)
        self.forecast = ForecastLine(self._aside)
        self._free_bytes = 0
        self._shown_by: dict[str, Callable[[Answer], None]] = {
            forecast_line.QUESTION: self.forecast.answered,
            memory_tab.QUESTION: self.memory.answered,
        }

    def turn(self, busy: bool) -> None:
        """Show what has been answered; ask what the reader looks for, unless something runs."""
        for answer in self._aside.take():
            self._shown_by[answer.name](answer)
        self.memory.turn(busy)

    def look(self, state: State, model: Model | None, rows: Sequence[Sequence[int]] | None, can_run: bool) -> None:
        """The choices as they stand; `rows` are each prompt's tokens. A forecast of what cannot run is no use."""
        if model is None or rows is None or not can_run:
            self.forecast.look(None, None)
            return
        recipe, settings = state.recipe(), state.settings(model)
        lengths = tuple(max(len(row), 1) for row in rows)  # an empty prompt is BOS
        key = id(model.decoder), model.device, str(recipe), lengths, settings, self._free(model)
        self.forecast.look(key, lambda: foreseen(model, recipe, lengths, settings))

    def alone(self, work: Work) -> Work:
        """The same work, undisturbed: nothing is begun here until `resume`, and what was is over when it starts."""
        self._aside.hold()

        def undisturbed(feed: Feed, cancel: threading.Event) -> Any:
            feed.progress(0, 0, "waiting for what is computed beside the page")
            if not self._aside.wait_quiet(cancel):
                raise Cancelled("It was stopped before it began.")
            return work(feed, cancel)

        return undisturbed

    def resume(self) -> None:
        """Nothing is timed any more; what is free now is another thing."""
        self._aside.resume()
        self._free_bytes = 0

    def _free(self, model: Model) -> int:
        """Free bytes of the model's device, as they were when they last moved by much."""
        free = free_bytes_of(model.decoder.device)
        if abs(free - self._free_bytes) > MOVED * free:
            self._free_bytes = free
        return self._free_bytes

    def close(self) -> None:
        """End the thread."""
        self._aside.close()


def foreseen(model: Model, recipe: Recipe, lengths: Sequence[int], settings: Settings) -> Foreseen:
    """What prompts of these lengths will need. Rehearsed without data: only lengths count."""
    engine = Engine(model.decoder, recipe.check(model.device).parts)
    run = engine.forecast([[model.config.bos_id] * length for length in lengths], settings)
    return Foreseen(run, foresee_compare(model, lengths, recipe, settings) if len(recipe) else None)
