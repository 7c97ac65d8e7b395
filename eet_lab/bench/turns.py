"""What timings share: how often, who is left out, and that the others are timed in turn until someone presses Stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from eet_lab.bench.progress import Tally
from eet_lab.errors import Cancelled, PromptError, first_line
from eet_lab.progress import Cancel

MOST_REPEATS = 10_000


class Runner(Protocol):
    """One who is ready to be timed."""

    @property
    def name(self) -> str: ...

    def time(self) -> None:
        """One measured run."""


def check_repeats(repeats: int) -> None:
    """PromptError unless something can be timed that often."""
    if not isinstance(repeats, int) or not 1 <= repeats <= MOST_REPEATS:
        raise PromptError(f"repeats is {repeats!r}, but it must be a whole number from 1 to {MOST_REPEATS:,}.")


def check(cancel: Cancel | None) -> None:
    """Raises Cancelled once someone has pressed Stop."""
    if cancel is not None and cancel.is_set():
        raise Cancelled("The benchmark was stopped.")


def split(reasons: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """The names that nothing speaks against, and a remark for each of the others."""
    remarks = [f"{name} is left out: {why}" for name, why in reasons.items() if why]
    return [name for name, why in reasons.items() if not why], remarks


def failed(name: str, error: Exception) -> str:
    """The remark on one who could not be made ready."""
    return f"{name} failed: {type(error).__name__}: {first_line(error)}"


def time_in_turn(runners: Sequence[Runner], repeats: int, tally: Tally, cancel: Cancel | None) -> None:
    """Time A, B, ..., A, B, ..., so that a device that warms up or slows down does so for all of them."""
    for repeat in range(repeats):
        for runner in runners:
            check(cancel)
            tally.say(f"timing {runner.name}, {repeat + 1} of {repeats}")
            runner.time()
            tally.finish()
