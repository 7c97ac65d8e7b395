"""How long work is followed and stopped: what every function that takes a while is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from eet_lab.errors import Cancelled

Progress = Callable[[int, int, str], None]
"""Called with units done, units in all, and what is being done now."""


class Cancel(Protocol):
    """Anything like a `threading.Event`: set it, and the work ends at the next place where it can."""

    def is_set(self) -> bool: ...


def raise_if_cancelled(cancel: Cancel | None, work: str) -> None:
    """End `work`, such as "The run", once someone has pressed Stop. Errors: Cancelled."""
    if cancel is not None and cancel.is_set():
        raise Cancelled(f"{work} was stopped.")


EARLY = 0.04
"""The share of the whole below which the pace so far says nothing."""


class Clock:
    """Units done of all, the steps within the present one, and the time left at the pace so far.

    The pace is taken from where a count was taken up: another total, or less done than before, is another count.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first = self._done = self._total = 0
        self._within = self._begun = self._told = 0.0
        self.start()

    def start(self) -> None:
        """A job begins; how much there is to do is not known yet."""
        self._take_up(0, 0)

    def progress(self, done: int, total: int) -> None:
        """So many units are done; 0 of 0: unknown."""
        if total != self._total or done < self._done:
            self._take_up(done, total)
        self._done, self._within, self._told = done, 0.0, self._now()

    def step(self, done: int, total: int) -> None:
        """Steps within the present unit."""
        self._within, self._told = done / max(total, 1), self._now()

    @property
    def share(self) -> float:
        """What is done, from 0 to 1."""
        return min((self._done + self._within) / max(self._total, 1), 1.0)

    def left(self) -> str:
        """The time left in words; empty while it cannot be said: too early, or the last unit is overdue."""
        since = self._done + self._within - self._first
        if since < EARLY * max(self._total, 1):
            return ""
        pace = (self._told - self._begun) / since  # seconds a unit
        going_on = min(self._now() - self._told, pace * (1 - self._within))
        seconds = pace * (self._total - self._done - self._within) - going_on
        if seconds <= 0:
            return ""
        return f"about {max(round(seconds), 1)} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"

    def _take_up(self, done: int, total: int) -> None:
        self._first, self._done, self._total, self._within = done, done, total, 0.0
        self._begun = self._told = self._now()
