"""How generated tokens reach the host without a synchronization per step."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

import torch

from eet_lab.ops.types import State


class StepTokens(NamedTuple):
    """What one step wrote: ids and done flags of all rows, and when, in ms since the run began."""

    ids: list[int]
    done: list[bool]
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
        return [StepTokens(state.ids.tolist(), state.done.tolist(), (time.perf_counter() - self._start) * 1e3)]

    def drain(self) -> list[StepTokens]:
        return []


class PinnedRing:
    """Pinned slots with an event each: the host runs at most `depth` steps ahead and never waits for the newest."""

    def __init__(self, num_rows: int, depth: int = 8) -> None:
        self._ids = torch.empty(depth, num_rows, dtype=torch.long, pin_memory=True)
        self._done = torch.empty(depth, num_rows, dtype=torch.bool, pin_memory=True)
        self._depth, self._count = depth, 0
        self._waiting: deque[tuple[int, torch.cuda.Event]] = deque()
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def push(self, state: State) -> list[StepTokens]:
        arrived = self._collect(keep=self._depth - 1)
        slot, self._count = self._count % self._depth, self._count + 1
        self._ids[slot].copy_(state.ids, non_blocking=True)
        self._done[slot].copy_(state.done, non_blocking=True)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._waiting.append((slot, event))
        return arrived

    def drain(self) -> list[StepTokens]:
        return self._collect(keep=0)

    def _collect(self, keep: int) -> list[StepTokens]:
        arrived = []
        while self._waiting and (len(self._waiting) > keep or self._waiting[0][1].query()):
            slot, event = self._waiting.popleft()
            event.synchronize()
            t_ms = self._start.elapsed_time(event)
            arrived.append(StepTokens(self._ids[slot].tolist(), self._done[slot].tolist(), t_ms))
        return arrived


def open_stream(device: torch.device, num_rows: int) -> TokenStream:
    """The stream that suits the device; its clock starts now."""
    return PinnedRing(num_rows) if device.type == "cuda" else HostStream()
