"""Telling how far a series of runs is, and about how long the rest takes."""

from __future__ import annotations

import time

from eet_lab.engine.engine import Progress


class Tally:
    """Counts finished units and passes them on with an estimate of the time left, from the mean of those before."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._start = 0, time.perf_counter()

    def say(self, message: str) -> None:
        """What is being done now."""
        if self._progress is not None:
            self._progress(self._done, self._total, message + self._left())

    def building(self, done: int, total: int, message: str) -> None:
        """A `Progress` for building kernels, which is part of one unit."""
        self.say(f"building kernels, {done} of {total}: {message}")

    def finish(self, units: int = 1) -> None:
        """So many more units are done."""
        self._done += units

    def _left(self) -> str:
        if self._done < 2:  # too early for an estimate
            return ""
        seconds = (time.perf_counter() - self._start) / self._done * (self._total - self._done)
        return f", about {max(round(seconds), 1)} s left"
