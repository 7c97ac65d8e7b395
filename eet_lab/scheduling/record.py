"""What is noted of traffic while it is served, simulated or for real."""

from __future__ import annotations

from array import array
from math import nan

import numpy as np

from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling.served import Passes, Served
from eet_lab.scheduling.traffic import Traffic

LOOKS = 1024
"""Passes between two looks at Stop, and two reports of progress."""


class Record:
    """When each request was begun and told its tokens, in ms from the beginning, and what each pass read."""

    def __init__(self, num: int, progress: Progress | None, cancel: Cancel | None) -> None:
        self.start, self.first, self.last = ([nan] * num for _ in range(3))
        self._passes = array("d")  # six numbers of each
        self._num, self._progress, self._cancel = num, progress, cancel
        self.done = 0

    def add(self, begin_ms: float, end_ms: float, rows: int, prompt_tokens: int, decoded: int, pads: int) -> None:
        """Note a pass. Cancelled once someone has pressed Stop."""
        self._passes.extend((begin_ms, end_ms, rows, prompt_tokens, decoded, pads))
        if len(self._passes) % (6 * LOOKS) == 0:
            raise_if_cancelled(self._cancel, "Serving the traffic")
            if self._progress is not None:
                self._progress(self.done, self._num, "requests")

    def served(self, traffic: Traffic, policy: str = "", source: str = "", preempted: int = 0) -> Served:
        """What has become of the traffic until now."""
        start, first, last = map(np.array, (self.start, self.first, self.last))
        begin_ms, end_ms, *counts = np.array(self._passes).reshape(-1, 6).T.copy()
        passes = Passes(begin_ms, end_ms, *(count.astype(np.int64) for count in counts))
        return Served(traffic, policy, source, start, first, last, passes, preempted)
