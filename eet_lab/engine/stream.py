"""How generated tokens reach the host without a synchronization per step."""

from __future__ import annotations

import time
from collections import deque
from functools import cache
from typing import NamedTuple, Protocol

import torch

from eet_lab.ops.types import State


class StepTokens(NamedTuple):
    """What one step wrote: the ids of all rows, and when they came, in ms since the run began."""

    ids: list[int]
    t_ms: float


class TokenStream(Protocol):
    """A queue of finished steps between the device and the host."""

    def push(self, state: State) -> list[StepTokens]:
        """After a step was launched: hand it over; returns the steps that have arrived meanwhile, oldest first."""
        ...

    def drain(self) -> list[StepTokens]:
        """Wait for all that is on its way."""
        ...


class HostStream:
    """On the CPU a step is finished when its call returns."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def push(self, state: State) -> list[StepTokens]:
        return [StepTokens(state.ids.tolist(), (time.perf_counter() - self._start) * 1e3)]

    def drain(self) -> list[StepTokens]:
        return []


class PinnedRing:
    """Pinned slots with an event each: the host runs at most `depth` steps ahead and never waits for the newest.

    A copy between two steps would hold up the second, so copies have a stream of their own.
    What they read stays as it is: a step writes one column of the canvas, and no other step writes that.
    """

    def __init__(self, state: State, column: int, depth: int = 8) -> None:
        """The first step writes `column`."""
        self._slots = torch.empty(depth, len(state.tokens), dtype=torch.long, pin_memory=True)
        self._column, self._depth = column, depth
        self._waiting: deque[tuple[int, torch.cuda.Event]] = deque()
        self._copies = _copy_stream(state.tokens.device.index)
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def push(self, state: State) -> list[StepTokens]:
        arrived = self._collect(keep=self._depth - 1)
        slot, event = self._column % self._depth, torch.cuda.Event(enable_timing=True)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            self._slots[slot].copy_(state.tokens[:, self._column], non_blocking=True)
            event.record()
        self._column += 1
        self._waiting.append((slot, event))
        return arrived

    def drain(self) -> list[StepTokens]:
        return self._collect(keep=0)

    def _collect(self, keep: int) -> list[StepTokens]:
        arrived = []
        while self._waiting and (len(self._waiting) > keep or self._waiting[0][1].query()):
            slot, event = self._waiting.popleft()
            event.synchronize()
            arrived.append(StepTokens(self._slots[slot].tolist(), self._start.elapsed_time(event)))
        return arrived


@cache
def _copy_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


def open_stream(state: State, column: int) -> TokenStream:
    """The stream that suits the state's device, for steps of which the first writes `column`; its clock starts now."""
    return PinnedRing(state, column) if state.tokens.is_cuda else HostStream()
