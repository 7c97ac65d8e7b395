"""Whether the next run fits: what it needs, by parts, and what would fit. Told before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from eet_lab.bench.fit import CompareForecast, Forecasts, forecasts
from eet_lab.engine.forecast import Forecast
from eet_lab.errors import first_line
from eet_lab.figures.memory_bar import ARENA, FREE, KV, OTHERS, SPARE, WEIGHTS, Part, bar, bar_state
from eet_lab.models import Model
from eet_lab.monitor import free_bytes_of
from eet_lab.words import counted, sized
from eet_lab.workbench.choices import State
from eet_lab.workbench.threads import Answer, Background

PATIENCE_S = 0.3
"""A choice that stands this long is worth a meta trace."""
MOVED = 0.05
"""The share of free memory that may come or go before a forecast is asked for again."""
COLORS = {"weights": WEIGHTS, "KV cache": KV, "its growth": "#93b8f8", "activations": ARENA, "workspace": SPARE}


NO_FORECAST: dict[str, Any] = {
    "summary": "", "kind": "dim", "words": [], "parts": [], "limit_share": None, "stale": False,
}  # fmt: skip
"""What the page shows where there is no forecast."""


class Fits:
    """Asks for a forecast in the background once the choices have settled. Only the ui thread calls it."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._key: Any = None
        self._free_bytes = 0
        self._stale, self._error = False, ""
        self._forecasts: Forecasts | None = None

    def look(self, state: State, model: Model | None, rows: Sequence[Sequence[int]] | None, can_run: bool) -> None:
        """The choices as they stand; `rows` are each prompt's tokens. A forecast of what cannot run is no use."""
        if model is None or rows is None or not can_run:
            self._ask(None, None)
            return
        recipe, settings = state.recipe(), state.settings(model)
        lengths = tuple(max(len(row), 1) for row in rows)  # an empty prompt is BOS
        key = id(model.decoder), model.device, str(recipe), lengths, settings, self._free(model)
        self._ask(key, lambda: forecasts(model, recipe, lengths, settings))

    def answered(self, answer: Answer) -> None:
        """A forecast; one of choices that are gone is dropped."""
        if answer.key == self._key:
            self._stale, self._forecasts = False, answer.value
            self._error = "" if answer.error is None else f"No forecast: {first_line(answer.error)}"

    def forget_free(self) -> None:
        """A job has ended: what is free now is another thing."""
        self._free_bytes = 0

    @property
    def warnings(self) -> tuple[str, str]:
        """The warnings of Run and Compare: a forecast exceeds free memory. "" where it does not, or there is none."""
        if self._forecasts is None or self._stale:
            return "", ""
        run, compare = self._forecasts
        needs = run.total_bytes, 0 if compare is None else compare.total_bytes
        run_words, compare_words = (_warning(need, run.free_bytes) for need in needs)
        return run_words, compare_words

    def state(self) -> dict[str, Any]:
        """What the page shows. A forecast that is asked for anew stays, marked as stale, so that nothing jumps."""
        if self._forecasts is None:
            return {**NO_FORECAST, "summary": self._error, "stale": self._stale}
        return {**told(*self._forecasts), "stale": self._stale}

    def _ask(self, key: Any, work: Callable[[], Forecasts] | None) -> None:
        if key == self._key:
            return
        self._key, self._error, self._stale = key, "", True
        if work is None:
            self._forecasts, self._stale = None, False
        else:
            self._background.ask(self.answered, key, work, PATIENCE_S)

    def _free(self, model: Model) -> int:
        """Free bytes of the model's device, as they were when they last moved by much."""
        free = free_bytes_of(model.decoder.device)
        if abs(free - self._free_bytes) > MOVED * free:
            self._free_bytes = free
        return self._free_bytes


def told(run: Forecast, compare: CompareForecast | None = None) -> dict[str, Any]:
    """A forecast in words, and as the parts of a bar."""
    left, shown = run.free_bytes - run.total_bytes, bar_state(_parts(run), run.free_bytes)
    if not run.fits:
        summary = f"Run does not fit: {sized(run.total_bytes)} of {sized(run.free_bytes)}"
        words = [f"It needs {sized(-left)} more than is free.", remedy(run)]
        return {"summary": summary, "kind": "bad", "words": words, **shown}
    words = [] if compare is None else [_on_compare(compare, run.free_bytes)]
    tight = compare is not None and compare.total_bytes > run.free_bytes
    summary = f"Run fits: {sized(run.total_bytes)} of {sized(run.free_bytes)}"
    return {"summary": summary, "kind": "warn" if tight else "good", "words": [*words, _room(run)], **shown}


def in_html(run: Forecast) -> str:
    """A forecast for a lesson: the words, and the bar below them."""
    state = told(run)
    words = "".join(f"<p>{escape(text)}</p>" for text in (state["summary"], *state["words"]))
    return f'<div class="eet-told eet-{state["kind"]}">{words}{bar(_parts(run), run.free_bytes)}</div>'


def _parts(run: Forecast) -> list[Part]:
    parts = [Part(name, num_bytes, COLORS.get(name, OTHERS)) for name, num_bytes in run.parts.items()]
    return [*parts, Part("free", run.free_bytes - run.total_bytes, FREE)] if run.fits else parts


def _warning(need_bytes: int, free_bytes: int) -> str:
    if need_bytes <= free_bytes:
        return ""
    return f"It may run out of memory: the forecast is {sized(need_bytes)}, and {sized(free_bytes)} are free"


def _on_compare(compare: CompareForecast, free_bytes: int) -> str:
    need, less = sized(compare.total_bytes), compare.total_bytes - free_bytes
    if less > 0:
        return f"Compare does not fit: it needs {need}, {sized(less)} too much. Use fewer prompts or new tokens."
    return (
        f"Compare fits too: {need}, of which {sized(compare.engine_bytes)} for both engines, which are kept so that "
        f"they can be timed in turn, and {sized(compare.check_bytes)} at most, for checking the output (one more run, "
        "and a pass in higher precision), reading held-out text (lossy recipes), and measuring the speed of memory. "
        "Ladder may keep more engines at a time, for the recipes in between, which this forecast leaves out."
    )


def _room(run: Forecast) -> str:
    more = run.largest_batch >= run.most_rows
    batch = f"{run.largest_batch:,} or more prompts" if more else counted(run.largest_batch, "prompt")
    return f"Room for {batch} like these, or {run.largest_context:,} tokens in each of {run.num_rows}."


def remedy(run: Forecast) -> str:
    """What to change, in the order of what it costs the reader."""
    if run.weight_bytes > run.free_bytes:
        return "The weights alone are too large: choose float16 or a smaller model, or free memory."
    ways = []
    if run.largest_context > run.prompt_tokens:
        new = run.largest_context - run.prompt_tokens
        ways.append(f"at most {counted(new, 'new token')}")
    elif run.largest_context:
        ways.append(f"prompts of at most {counted(run.largest_context - 1, 'token')} with one new token")
    if run.largest_batch:
        ways.append(f"at most {counted(run.largest_batch, 'prompt')}")
    return f"Would fit: {', or '.join(ways)}." if ways else "Not even one prompt would fit: shorten it, or free memory."
