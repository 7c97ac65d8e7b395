"""Timing of calls that take microseconds: captured into a CUDA graph and replayed, or looped over on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

REGION_MS = 100.0
"""A region of calls between two looks at the clock is at least about this long."""


def event_ms(work: Callable[[], Any]) -> float:
    """Milliseconds that the device takes for what `work` launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def took_ms(work: Callable[[], Any], device: str) -> float:
    """Milliseconds that one call takes on `device` ("cpu" or "cuda")."""
    if device == "cuda":
        return event_ms(work)
    start = time.perf_counter()
    _kept = work()  # to be freed after the clock was read
    return (time.perf_counter() - start) * 1e3


def captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """The calls as one graph; what they return lives as long as it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries make their workspaces at the first call, which can't be captured
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kept until the capture ends: each call then writes to memory of its own, as its inputs are its own.
        kept = [call() for call in calls]
    del kept
    return graph


class Timed:
    """Calls that do the same, each on a copy of the inputs; `ms` is one region's mean.

    Their inputs come from memory only if all copies together are larger than the caches.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], device: str) -> None:
        self._num = len(calls)
        self._graph = captured(calls) if device == "cuda" else None
        self._calls = calls
        self._rounds = 1
        self.ms()
        self._rounds = max(1, round(REGION_MS / (self.ms() * self._num)))

    def ms(self) -> float:
        """Milliseconds a call, over a region."""
        if self._graph is not None:
            return event_ms(self._replays) / self._rounds / self._num
        start = time.perf_counter()
        for _ in range(self._rounds):
            for call in self._calls:
                call()
        return (time.perf_counter() - start) * 1e3 / self._rounds / self._num

    def _replays(self) -> None:
        assert self._graph is not None
        for _ in range(self._rounds):
            self._graph.replay()
