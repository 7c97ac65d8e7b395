"""How far a job is, and how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable

EARLY = 0.04
"""Below this share an estimate of the time left says nothing."""


class Clock:
    """Phases done of all, the steps within the present one, and the time left at the pace so far."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.start()

    def start(self) -> None:
        """A job begins."""
        self._begun, self._done, self._total, self._within = self._now(), 0, 0, 0.0

    def progress(self, done: int, total: int) -> None:
        """So many units are done; 0 of 0: unknown."""
        self._done, self._total, self._within = done, total, 0.0

    def step(self, done: int, total: int) -> None:
        """Steps within the present unit."""
        self._within = done / max(total, 1)

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min((self._done + self._within) / max(self._total, 1), 1.0)

    def left(self) -> str:
        """The time left in words; empty while it is too early to say."""
        if self.share < EARLY:
            return ""
        seconds = (self._now() - self._begun) / self.share * (1 - self.share)
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
