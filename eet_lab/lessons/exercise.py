"""Exercises: the learner's answer is judged, and what is wrong with it is said in words."""

from __future__ import annotations

import inspect
import math
import operator
import os
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, TypeVar

from eet_lab.lessons.show import Shown, note, source, table
from eet_lab.words import plain

C = TypeVar("C")
S = TypeVar("S")
N = TypeVar("N", int, float)


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
        Shown(note(sign + self.message, kind), *self.shown)._ipython_display_()


class Wrong(Exception):
    """Raised in a check: what is wrong with the answer, in words that help."""


class Unanswered(Exception):
    """Raised in a check: the stub still stands."""


@dataclass(frozen=True)
class Exercise:
    """A task: `judge(answer)` returns what to say and show of a right answer, and raises `Wrong` for another one.

    `solution` is one right answer. With EET_LAB_FAST=1 in the environment it stands in for a missing one, and must
    pass, so that a notebook that is run by a test tests its exercise too. `slips` are wrong answers by the words that
    they get.
    """

    judge: Callable[[Callable], tuple[str, tuple[Any, ...]]]
    answer: Callable
    slips: Mapping[str, Callable] = field(default_factory=dict)

    def check(self, answer: Callable) -> Verdict:
        """Judge a function. Never raises, whatever the function does."""
        if not callable(answer):
            return Verdict(False, f"check takes the function itself, by its name alone, not {named(answer)}.")
        try:
            verdict = self._verdict(answer)
        except Exception as error:  # noqa: BLE001  it went into the engine, and came to grief there
            words = f"what your function returns could not be used: {type(error).__name__}: {_said(error)}"
            return Verdict(False, f"{words}. Compare it with the task above.")
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


def formula(
    solution: Callable,
    cases: Mapping[str, tuple],
    slips: Mapping[str, Callable],
    message: str,
    *,
    names: Sequence[str] = ("answer",),
    otherwise: str,
) -> Exercise:
    """A task whose answer is a number, or a tuple with one for each of `names`, computed for all `cases`.

    `cases` are arguments by what they are about. `slips` are wrong answers that learners give, by the words that help:
    functions like `solution`, with None for a number that the slip leaves alone. Any other wrong answer gets the words
    of `otherwise`; a right one `message`, and a table of all cases.
    """

    def judge(answer: Callable) -> tuple[str, tuple[Any, ...]]:
        given = {case: _numbers(ask(answer, *args), names) for case, args in cases.items()}
        right = {case: _each(solution(*args)) for case, args in cases.items()}
        for case, place in product(cases, range(len(names))):
            if not _is(given[case][place], right[case][place]):
                raise Wrong(
                    f"{case}: you return {_figure(given[case][place])}{_of(names, place)}; it should be "
                    f"{_figure(right[case][place])}. {why(given, case, place)}"
                )
        return message, (table(["", *names], [[case, *map(_figure, right[case])] for case in cases]),)

    def why(given: Mapping[str, Sequence[float]], wrong: str, place: int) -> str:
        def fits(slip: Callable, case: str) -> bool:
            return _is(given[case][place], _each(slip(*cases[case]))[place])

        return explained(slips, fits, cases, wrong) or otherwise

    return Exercise(judge, solution, slips)


def explained(slips: Mapping[str, S], fits: Callable[[S, C], bool], cases: Iterable[C], wrong: C) -> str:
    """The words of the slip that fits all that was given, or else the wrong case; none at all if there is no such."""
    for told in (list(cases), [wrong]):
        for words, slip in slips.items():
            if all(fits(slip, case) for case in told):
                return words
    return ""


def _each(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _numbers(value: Any, names: Sequence[str]) -> list[float]:
    """What the learner returned, as numbers; infinity is one here."""
    numbers = listed(
        [value] if len(names) == 1 else value, len(names), lambda each: math.inf if each == math.inf else number(each)
    )
    if numbers is None:
        wanted = "a number" if len(names) == 1 else f"{len(names)} numbers, {' and '.join(names)}"
        raise Wrong(f"return {wanted}; you returned {named(value)}.")
    return numbers


def listed(value: Any, count: int, read: Callable[[Any], N | None]) -> list[N] | None:
    """What the learner returned, if it is so many things that `read` takes for numbers; else None."""
    try:
        found = [read(each) for each in islice(value, count + 1)]
    except Exception:  # noqa: BLE001  whatever a reader's object does when it is iterated or compared
        return None
    numbers = [each for each in found if each is not None]
    return numbers if len(numbers) == len(found) == count else None


def _is(given: float, right: float | None) -> bool:
    """Whole numbers must be hit, others to four digits; None is nobody's answer."""
    if right is None or isinstance(right, int) or max(abs(given), abs(right)) > 1e300:  # an int may have no float
        return given == right
    return math.isclose(given, right, rel_tol=1e-4, abs_tol=1e-12)


def _of(names: Sequence[str], place: int) -> str:
    return f" for {names[place]}" if len(names) > 1 else ""


def _figure(value: float) -> str:
    if value in (math.inf, -math.inf):
        return "never" if value > 0 else "-inf"
    if abs(value) >= 1e15:
        return BRIEF.repr(value)
    return f"{int(value):,}" if value == int(value) else plain(value)


def ask(answer: Callable, *args: Any) -> Any:
    """What the learner's function returns; an error in it becomes `Wrong`, a stub `Unanswered`."""
    try:
        value = answer(*args)
    except (Exception, SystemExit) as error:
        name = getattr(answer, "__name__", "")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name == name]
        where = f" in line {frames[-1].lineno} of the cell ({frames[-1].line})" if frames else ""
        raise Wrong(f"your function raised {type(error).__name__}: {_said(error)}{where}.") from error
    if value is ... or (value is None and _is_stub(answer)):
        raise Unanswered
    if value is None:
        raise Wrong(f"your function returned None, given {_given(answer, args)}: each path through it needs a return.")
    return value


def whole(value: Any) -> int | None:
    """A whole number as an int, be it Python's, numpy's or torch's; None for anything else."""
    try:
        return operator.index(value)
    except Exception:  # noqa: BLE001  a tensor of many numbers has a reason of its own
        return None


def number(value: Any) -> float | None:
    """A finite number, whole or not, be it Python's, numpy's or torch's; None for anything else."""
    if (as_int := whole(value)) is not None:
        return as_int
    try:
        found = value.item() if hasattr(value, "item") else value
        return found if isinstance(found, float) and math.isfinite(found) else None
    except Exception:  # noqa: BLE001  as above
        return None


def named(value: Any) -> str:
    """A value in a sentence: shortened, with its type."""
    shown = BRIEF.repr(value)
    return shown if value is None or shown.startswith("<") else f"{shown} ({type(value).__name__})"


def _said(error: BaseException) -> str:
    """An error's own words, the first of them."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  a reader's class may do anything
        return "it cannot be shown"
    return words if len(words) <= 160 else words[:159] + "…"


def _is_stub(answer: Callable) -> bool:
    """Whether a function does nothing at all, as the notebook's own."""
    code = getattr(answer, "__code__", None)
    return code is not None and code.co_code in {stub.__code__.co_code for stub in (_bare, _documented)}


def _bare() -> None: ...


def _documented() -> None:
    """A stub, as notebooks have them."""


def _given(answer: Callable, args: tuple[Any, ...]) -> str:
    """Arguments by name, each in brief."""
    try:
        names = inspect.signature(answer).bind(*args).arguments
    except (TypeError, ValueError):  # not every callable tells
        return ", ".join(map(BRIEF.repr, args))
    return ", ".join(f"{name}={BRIEF.repr(value)}" for name, value in names.items())


class _Brief(reprlib.Repr):
    """Short, and for everything: what cannot be shown is told by its type."""

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            shown = repr(x)
        except Exception:  # noqa: BLE001  a reader's class may do anything
            return f"<{type(x).__name__}>"
        return shown if len(shown) <= self.maxother else shown[: self.maxother - 1] + "…"


BRIEF = _Brief()
BRIEF.maxother, BRIEF.maxstring, BRIEF.maxtuple, BRIEF.maxlist, BRIEF.maxlong = 90, 120, 2, 5, 40
