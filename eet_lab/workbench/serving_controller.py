"""What a serving page does: it simulates, measures and serves, one thing at a time. Only the ui thread calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go

from eet_lab.errors import Cancelled, CostError, EETError, did_you_mean
from eet_lab.figures.serving import batches, cost_surface, latency_against_load, simulated_beside_measured
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.served import Served
from eet_lab.serving.live import Look
from eet_lab.words import visible
from eet_lab.workbench.background import Answer, Background
from eet_lab.workbench.serving_choices import Asked, against_load, simulated
from eet_lab.workbench.serving_model import Measured, RunOnModel, measure, serving
from eet_lab.workbench.serving_page import Page

QUESTION = "serving"
WORK: dict[str, Callable[..., Any]] = {"simulate": simulated, "loads": against_load}
ON_MODEL = ("measure", "serve")
"""What needs the model, and the thread that may run it."""
BEGUN = {"simulate": "Simulating …", "loads": "Simulating …", "measure": "Measuring …", "serve": "Serving …"}
ACTIONS = (*WORK, *ON_MODEL, "stop")
ORDER = ("agreement", "batches", "loads", "table")
"""The order of figures: what was asked for last is rarely the table."""
SHOWN_PASSES = 60
"""Passes that the kept figure has in view, around the longest queue: boxes of more are too narrow to read."""
LOOKS = 2000


def checked_action(action: str) -> str:
    """The same; EETError for what is none."""
    if action not in ACTIONS:
        raise EETError(
            f"There is no action {action!r}.{did_you_mean(action, ACTIONS)} Actions are {', '.join(ACTIONS)}."
        )
    return action


class ServingController:
    """The page, the cost table, and what came of them. `press`, `take` and `tick` are for the ui thread.

    `put` is called with an action by the page's buttons, on any thread. Simulations are asked of `background`;
    `on_model` does what needs the model, and None is a page without one. Of what is asked for only the newest counts.
    """

    def __init__(
        self,
        asked: Asked,
        table: CostTable,
        put: Callable[[str], None],
        background: Background,
        on_model: RunOnModel | None = None,
    ) -> None:
        self.table = table
        self.results: dict[str, Served] = {}
        self.measured: dict[str, Measured] = {}
        """What was served for real, by the name of the policy."""
        self.figures: dict[str, go.Figure] = {}
        self.page = Page(asked, table, put, with_model=on_model is not None)
        self._background, self._on_model = background, on_model
        self._cancel = threading.Event()
        self._number = 0
        self._pending: tuple[int, str, Asked] | None = None
        self._said = ""
        self._is_own = False  # the table was measured here, not given
        self._look: Look | None = None
        self._loads: tuple[Asked, Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether something is asked for that was not answered."""
        return self._pending is not None

    @property
    def action(self) -> str:
        """What is being done; "" for nothing."""
        return self._pending[1] if self._pending else ""

    def press(self, action: str) -> None:
        """Begin what a button asks for, or stop what goes on. Errors are told on the page."""
        if checked_action(action) == "stop":
            self.stop()
            return
        try:
            self._begin(action)
        except EETError as error:
            self.page.tell_error(error)

    def stop(self) -> None:
        """Let what goes on end, and the film."""
        self._cancel.set()
        self.page.film.stop()

    def tick(self) -> None:
        """Show how far it is."""
        if self._pending is None:
            return
        self.page.tell(self._said)
        look, self._look = self._look, None
        if look is not None:
            self.page.live.push(look)

    def take(self, answer: Answer) -> None:
        """Show what came of it; an answer that nobody waits for any more is dropped."""
        if self._pending is None or answer.key != self._pending[0]:
            return
        (_, action, asked), self._pending = self._pending, None  # first: whatever becomes of it, nobody waits for it
        self.page.set_busy(False)
        if answer.error is None and answer.value is not None:
            self._show(action, asked, answer.value)
        elif answer.error is None or isinstance(answer.error, Cancelled):
            self.page.tell("Stopped.")
        else:
            self.page.tell_error(answer.error)

    def finish(self, value: Any, error: BaseException | None) -> None:
        """The same for work that `on_model` was given: it is the newest, since nothing begins beside it."""
        if self._pending is not None:
            self.take(Answer(QUESTION, self._pending[0], value, error))

    def _begin(self, action: str) -> None:
        asked, number, cancel = self.page.asked(), self._number + 1, threading.Event()
        if action in ON_MODEL:
            if self._on_model is None:
                raise EETError("There is no model to run. Open the view with one: ServingView(model='demo').")
            if action == "serve" and not self._is_own:
                raise CostError(
                    f"The cost table is an example, of {visible(self.table.source.model)}: there is nothing of this "
                    "model to simulate beside. Press Measure this model first."
                )
            work = measure if action == "measure" else serving(asked, self.table, self._take_look)
            self._on_model(action, number, work, cancel)
        else:
            self._background.ask(QUESTION, number, self._simulation(action, asked, cancel))
        self._cancel.set()  # what runs is no longer asked for
        self._number, self._cancel, self._said = number, cancel, BEGUN[action]
        self._pending = number, action, asked
        if action == "serve":
            self.page.live.clear()
        self.page.set_busy(True)

    def _simulation(self, action: str, asked: Asked, cancel: threading.Event) -> Callable[[], Any]:
        work, table = WORK[action], self.table
        return lambda: work(asked, table, self.progress, cancel)

    def progress(self, done: int, total: int, what: str = "") -> None:
        """How far it is; from any thread."""
        self._said = f"{what}: {done:,} of {total:,}"

    def _take_look(self, look: Look) -> None:
        """The newest look is drawn in the next turn; it is called on the thread that serves."""
        self._look = look

    def _show(self, action: str, asked: Asked, value: Any) -> None:
        told = asked.in_words(self.table)
        if action == "loads":
            self._loads = asked, value
        elif action == "measure":
            self._put_table(value)
        elif action == "serve":
            self.measured[value.policy] = value
            title = f"Simulated beside measured, {value.policy} on {value.served.source}: {told}"
            self.figures["agreement"] = simulated_beside_measured(value.compared, title)
        else:
            self.results = value
            self.figures["batches"] = batches(value, f"Around the longest queue: {told}", _busiest(value))
            self.page.film.show(value, told)
        if self._loads is not None:
            self.figures["loads"] = self._against_load(*self._loads)
        served = {f"{name}, measured": each.served for name, each in self.measured.items()}
        self.figures = {name: self.figures[name] for name in ORDER if name in self.figures}
        self.page.show(self.results | served, self.figures, self.measured)

    def _put_table(self, table: CostTable) -> None:
        """From now on this model's own times count; what was simulated over others is taken down."""
        self.table, self.results, self.measured, self._loads = table, {}, {}, None
        self._is_own = True
        self.page.film.stop()
        self.page.put_table(table, is_example=False)
        surface = cost_surface(table, f"What a pass takes, measured: {table.source.model}")
        self.figures = {"table": surface}

    def _against_load(self, asked: Asked, points: Any) -> go.Figure:
        title = f"Latency against load (solid p99, dotted p50): {asked.in_words(self.table)}"
        return latency_against_load(points, title, measured={n: [each.point] for n, each in self.measured.items()})


def _busiest(runs: dict[str, Served]) -> tuple[float, float]:
    """The time around the longest queue, in which the run with the most passes has SHOWN_PASSES of them."""
    looks = np.linspace(0.0, max(float(each.passes.end_ms[-1]) for each in runs.values()), LOOKS)
    middle = float(looks[np.argmax(np.max([each.queued(looks) for each in runs.values()], axis=0))])
    passes = max((each.passes for each in runs.values()), key=len)
    last = len(passes) - 1
    first = int(np.clip(np.searchsorted(passes.begin_ms, middle) - SHOWN_PASSES // 2, 0, max(last - SHOWN_PASSES, 0)))
    return float(passes.begin_ms[first]), float(passes.end_ms[min(first + SHOWN_PASSES, last)])
