"""Exercises: the learner's answer is judged, and what is wrong with it is said in words."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.display import HTML, display

from eet_lab.panels import theme
from eet_lab.panels.lessons.show import Shown, source


@dataclass(frozen=True)
class Verdict:
    """What came of an answer: `ok` is True, False, or None while there is no answer. `shown` is displayed below."""

    ok: bool | None
    message: str
    shown: tuple[Any, ...] = ()

    def require(self) -> Verdict:
        """Itself if the answer is right; AssertionError if not."""
        if not self.ok:
            raise AssertionError(self.message)
        return self

    def _ipython_display_(self) -> None:
        sign, kind = {True: ("Right. ", "good"), False: ("Not yet: ", "warn"), None: ("", "plain")}[self.ok]
        display(HTML(theme.stylesheet() + theme.note(sign + self.message, kind)))
        Shown(*self.shown)._ipython_display_()


class Wrong(Exception):
    """Raised in a check: what is wrong with the answer, in words that help."""


class Unanswered(Exception):
    """Raised in a check: the stub still stands."""


@dataclass(frozen=True)
class Exercise:
    """A task: `judge(answer)` returns what to say and show of a right answer, and raises `Wrong` for another one.

    `solution` is one right answer. With EET_LAB_FAST=1 in the environment it stands in for a missing one, and must
    pass, so that a notebook that is run by a test tests its exercise too.
    """

    judge: Callable[[Callable], tuple[str, tuple[Any, ...]]]
    answer: Callable

    def check(self, answer: Callable) -> Verdict:
        """Judge a function. Never raises, whatever the function does."""
        verdict = self._verdict(answer)
        if verdict.ok is None and os.environ.get("EET_LAB_FAST"):
            return self._verdict(self.answer).require()
        return verdict

    def solution(self) -> Any:
        """One right answer, as source."""
        return source(self.answer)

    def _verdict(self, answer: Callable) -> Verdict:
        try:
            message, shown = self.judge(answer)
        except Unanswered:
            return Verdict(None, "Not answered yet: replace the ... in the function and run this cell again.")
        except Wrong as wrong:
            return Verdict(False, str(wrong))
        return Verdict(True, message, shown)


def ask(answer: Callable, *args: Any) -> Any:
    """What the learner's function returns; an error in it becomes `Wrong`, nothing becomes `Unanswered`."""
    try:
        value = answer(*args)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name == answer.__name__]
        where = f" in line {frames[-1].lineno} of the cell ({frames[-1].line})" if frames else ""
        raise Wrong(f"your function raised {type(error).__name__}: {error}{where}.") from error
    if value is None or value is ...:
        raise Unanswered
    return value
