"""How generated tokens reach the host without a synchronization per step."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eet_lab.engine.clock import RequestClock
from eet_lab.ops.types import TokenBuffer
from eet_lab.scheduling import Request
from eet_lab.scheduling.run_ahead import RunAhead

AHEAD = 8
"""The most passes that a GPU is given before the host has read the first of them."""


class StepTokens(NamedTuple):
    """What one step wrote: the ids of all rows, and when they came, in ms since the request did, without setup."""

    ids: list[int]
    t_ms: float
    logprobs: list[list[float]] | None = None  # rows of a `LogprobLog`, if the step wrote them


class PassTokens(NamedTuple):
    """What a pass has told, once it has come to the host: nothing where it only read prompts."""

    t_ms: float
    tokens: list[tuple[Request, int]]


class TokenStream(Protocol):
    """A queue of finished steps between the device and the host."""

    def push(self, buffer: TokenBuffer, logprobs: Tensor | None) -> list[StepTokens]:
        """Take over a step that was launched. Returns the steps that have arrived meanwhile, oldest first.

        `logprobs` [R,B,...]: what it wrote beside its tokens, in the row of its number, as in the buffer's log.
        """
        ...

    def drain(self) -> list[StepTokens]:
        """Wait for all that is on its way."""
        ...


class HostStream:
    """The stream of a CPU, where a step is finished when its call returns."""

    def __init__(self, clock: RequestClock) -> None:
        self._clock, self._num_passes = clock, 0

    def push(self, buffer: TokenBuffer, logprobs: Tensor | None) -> list[StepTokens]:
        rows = None if logprobs is None else logprobs[self._num_passes % len(logprobs)].tolist()
        self._num_passes += 1
        return [StepTokens(buffer.ids.tolist(), self._clock.since_ms() - self._clock.setup_ms, rows)]

    def drain(self) -> list[StepTokens]:
        return []


class PinnedRing:
    """Pinned slots with an event each: the host is as many steps ahead as `run_ahead` says.

    A copy between two steps would hold up the second, so copies have a stream of their own.
    What they read stays as it is: the buffer's log has more rows than the host may be steps behind.
    Events and views are made once: a small model's step takes the device no longer than they take the host (LOG).
    """

    def __init__(self, clock: RequestClock, device: torch.device, num_rows: int, run_ahead: RunAhead) -> None:
        """The first step is the token buffer's first pass.

        Nothing of the request is on the device yet, so both clocks agree where the stream has nothing else to do.
        """
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()
        self._clock, self._before_ms = clock, clock.since_ms()
        self._slots = torch.empty(AHEAD, num_rows, dtype=torch.long, pin_memory=True).unbind()
        self._launched = [torch.cuda.Event() for _ in range(AHEAD)]
        self._copied = [torch.cuda.Event(enable_timing=True) for _ in range(AHEAD)]
        self._num_passes, self._run_ahead = 0, run_ahead
        self._waiting: deque[tuple[int, Tensor | None]] = deque()
        self._device, self._copies = device.index, _copy_stream(device.index)
        self._current = torch.cuda.current_stream(device)

    def push(self, buffer: TokenBuffer, logprobs: Tensor | None) -> list[StepTokens]:
        arrived, rows = self._collect(launched=1), None
        slot, current = self._num_passes % AHEAD, self._current
        # torch.cuda.current_stream takes Python longer than the launch of a graph (LOG).
        if torch._C._cuda_getCurrentRawStream(self._device) != current.cuda_stream:
            current = self._current = torch.cuda.current_stream(self._device)
        self._launched[slot].record(current)
        self._copies.wait_event(self._launched[slot])
        torch.cuda.set_stream(self._copies)
        try:
            self._slots[slot].copy_(buffer.log[self._num_passes % len(buffer.log)], non_blocking=True)
            if logprobs is not None:  # pinned memory is kept by PyTorch, and comes again
                rows = torch.empty(logprobs.shape[1:], dtype=logprobs.dtype, pin_memory=True)
                rows.copy_(logprobs[self._num_passes % len(logprobs)], non_blocking=True)
            self._copied[slot].record(self._copies)
        finally:
            torch.cuda.set_stream(current)
        self._num_passes += 1
        self._waiting.append((slot, rows))
        return arrived

    def drain(self) -> list[StepTokens]:
        return self._collect(launched=AHEAD)

    def _collect(self, launched: int) -> list[StepTokens]:
        """Take what is there, and wait until there is room for so many that were launched, or nothing left."""
        arrived = []
        while self._waiting:
            slot, rows = self._waiting[0]
            copied = self._copied[slot]
            if not copied.query():
                if len(self._waiting) + launched <= self._run_ahead.passes:
                    break
                copied.synchronize()
            self._waiting.popleft()
            since_ms = self._start.elapsed_time(copied)
            self._run_ahead.read(since_ms)
            t_ms = self._before_ms + since_ms - self._clock.setup_ms
            arrived.append(StepTokens(self._slots[slot].tolist(), t_ms, None if rows is None else rows.tolist()))
        return arrived


@cache
def _copy_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


def open_stream(clock: RequestClock, device: torch.device, num_rows: int, lead_ms: float) -> TokenStream:
    """The stream that suits the device; opened before any work there. `lead_ms`: how far the host may be ahead."""
    most = passes_ahead(device)
    return PinnedRing(clock, device, num_rows, RunAhead(most, lead_ms)) if most else HostStream(clock)


def passes_ahead(device: torch.device) -> int:
    """How many passes a device is given at most before the host has read the first of them."""
    return AHEAD if device.type == "cuda" else 0
