"""The line under Run: what the next run needs, whether it fits, and what would. Told before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

import ipywidgets as W

from eet_lab.bench.foresee import CompareForecast
from eet_lab.engine.forecast import Forecast
from eet_lab.errors import first_line
from eet_lab.panels.aside import Answer, Aside
from eet_lab.panels.memory_bar import ARENA, FREE, KV, OTHERS, SPARE, WEIGHTS, Part, bar
from eet_lab.words import counted, sized

QUESTION = "forecast"
PATIENCE_S = 0.3
"""A choice that stands this long is worth a rehearsal."""
ENGINES = "both engines, the baseline's and the selection's, which stay so that they can be timed in turn"
CHECK = (
    "the most that is needed beside them: to check the output, one more run and a pass at higher precision; for lossy "
    "recipes, to read held-out text; on a CPU, the buffer by which the speed of memory is measured"
)
LADDER = "Ladder has one engine at a time beside that check, but of recipes in between, which are not foreseen here"
COLORS = {"weights": WEIGHTS, "KV cache": KV, "its growth": "#93b8f8", "activations": ARENA, "workspace": SPARE}


class Foreseen(NamedTuple):
    """What is told of one set of choices; `compare` is None where there is nothing to compare."""

    run: Forecast
    compare: CompareForecast | None


class ForecastLine:
    """Asks for a forecast beside the page once the choices have settled. Only the ui thread calls it."""

    def __init__(self, aside: Aside) -> None:
        self._aside = aside
        self._key: Any = None
        self.foreseen: Foreseen | None = None
        self.box = W.HTML().add_class("eet-forecast")

    def look(self, key: Any, work: Callable[[], Foreseen] | None) -> None:
        """The choices as they stand: `key` tells them apart, `work` makes the forecast (None: there can be none)."""
        if key == self._key:
            return
        self._key, self.foreseen = key, None
        if work is None:
            self.box.value = ""
        else:
            self.box.value = self.box.value.replace('class="eet-told', 'class="eet-stale eet-told')
            self._aside.ask(QUESTION, key, work, PATIENCE_S)

    @property
    def warnings(self) -> tuple[str, str]:
        """Of Run and of Compare: that it is not foreseen to fit; "" where it is, or where nothing is foreseen."""
        if self.foreseen is None:
            return "", ""
        run, compare = self.foreseen
        needs = run.total_bytes, 0 if compare is None else compare.total_bytes
        run_words, compare_words = (_warning(need, run.free_bytes) for need in needs)
        return run_words, compare_words

    def answered(self, answer: Answer) -> None:
        """A forecast; one of choices that are gone is dropped."""
        if answer.key != self._key:
            return
        if answer.error is not None:
            words = f"No forecast: {first_line(answer.error)}"
            self.box.value = f'<div class="eet-told eet-dim">{escape(words)}</div>'
            return
        self.foreseen = answer.value
        self.box.value = in_html(*answer.value)


def in_html(told: Forecast, compare: CompareForecast | None = None) -> str:
    """The forecast of a run as a line of words and a bar, with a word on Compare."""
    parts = [Part(name, num_bytes, COLORS.get(name, OTHERS)) for name, num_bytes in told.parts.items()]
    left = told.free_bytes - told.total_bytes
    kind, more = "good" if told.fits else "bad", ""
    if told.fits:
        parts.append(Part("free", left, FREE))
        words = f"Run fits: {sized(told.total_bytes)} of {sized(told.free_bytes)}."
        more = f"<span>{escape(_room(told))}</span>"
        if compare is not None:
            kind = "good" if compare.total_bytes <= told.free_bytes else "warn"
            more = _on_compare(compare, told.free_bytes) + more
    else:
        words = (
            f"Run does not fit: it needs {sized(told.total_bytes)}, and {sized(told.free_bytes)} are there, "
            f"{sized(-left)} too few. {_remedy(told)}"
        )
    return (
        f'<div class="eet-told eet-{kind}" role="status"><div class="eet-told-words"><b>{escape(words)}</b>{more}</div>'
        f"{bar(parts, told.free_bytes)}</div>"
    )


def _warning(need_bytes: int, free_bytes: int) -> str:
    if need_bytes <= free_bytes:
        return ""
    return f"It may run out of memory: {sized(need_bytes)} are foreseen, and {sized(free_bytes)} are there"


def _on_compare(compare: CompareForecast, free_bytes: int) -> str:
    need, less = sized(compare.total_bytes), compare.total_bytes - free_bytes
    words = f"Compare fits too: {need}."
    if less > 0:
        words = f"Compare does not: it needs {need}, {sized(less)} too much. Give it fewer prompts or new tokens."
    tip = f"{sized(compare.engine_bytes)}: {ENGINES}; {sized(compare.check_bytes)}: {CHECK}. {LADDER}."
    return f'<span class="eet-told-compare" title="{escape(tip)}">{escape(words)}</span>'


def _room(told: Forecast) -> str:
    more = told.largest_batch >= told.most_rows
    batch = f"{told.largest_batch:,} or more prompts" if more else counted(told.largest_batch, "prompt")
    return f"Room for {batch} like these, or {told.largest_context:,} tokens in each of {told.num_rows}."


def _remedy(told: Forecast) -> str:
    """What to change, in the order of what it costs the reader."""
    if told.weight_bytes > told.free_bytes:
        return "The weights alone are too large: choose float16, a smaller model, or free the device."
    ways = []
    if told.largest_context > told.prompt_tokens:
        new = told.largest_context - told.prompt_tokens
        ways.append(f"at most {counted(new, 'new token')}")
    elif told.largest_context:
        ways.append(f"prompts of at most {counted(told.largest_context - 1, 'token')} with one new token")
    if told.largest_batch:
        ways.append(f"at most {counted(told.largest_batch, 'prompt')}")
    return f"Would fit: {', or '.join(ways)}." if ways else "Not even one prompt would: shorten it, or free the device."
