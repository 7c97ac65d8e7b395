"""How generated tokens reach the host without a synchronization per step."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eet_lab.engine.clock import RequestClock
from eet_lab.ops.cuda.launching import stream_of
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

    def push(self, buffer: TokenBuffer, logprobs: Tensor | None, is_full: bool) -> list[StepTokens]:
        """Take over a step that was launched. Returns the steps that have arrived meanwhile, oldest first.

        `logprobs` [R,B,...]: what it wrote beside its tokens, in the row of its number, as in the buffer's log.
        `is_full`: no request could be let in now, so the host may be further ahead.
        """
        ...

    def drain(self) -> list[StepTokens]:
        """Wait for all that is on its way."""
        ...


class HostStream:
    """The stream of a CPU, where a step is finished when its call returns."""

    def __init__(self, clock: RequestClock) -> None:
        self._clock, self._num_passes = clock, 0

    def push(self, buffer: TokenBuffer, logprobs: Tensor | None, is_full: bool) -> list[StepTokens]:
        rows = None if logprobs is None else logprobs[self._num_passes % len(logprobs)].tolist()
        self._num_passes += 1
        return [StepTokens(buffer.ids.tolist(), self._clock.since_ms() - self._clock.setup_ms, rows)]

    def drain(self) -> list[StepTokens]:
        return []


class PinnedRing:
    """Pinned slots with an event each: the host is at most as many passes ahead as a `RunAhead` says.

    A copy between two steps would hold up the second, so copies have a stream of their own.
    What they read stays as it is: the buffer's log has more rows than the host may be steps behind.
    Events and views are made once: a small model's step takes the device no longer than they take the host (LOG).
    """

    def __init__(self, clock: RequestClock, device: torch.device, num_rows: int, lead_ms: float) -> None:
        """The next pass is the token buffer's first one.

        Nothing of the request is on the device yet, so both clocks agree where the stream has nothing else to do.
        """
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()
        self._clock, self._before_ms = clock, clock.since_ms()
        self._slots = torch.empty(AHEAD, num_rows, dtype=torch.long, pin_memory=True).unbind()
        self._launched = [torch.cuda.Event() for _ in range(AHEAD)]
        # One more: a pass is timed from the one before it, since CUDA tells times as float32. A server may be busy for
        # days, and after ten hours such a number has steps of 4 ms.
        self._copied = [torch.cuda.Event(enable_timing=True) for _ in range(AHEAD + 1)]
        self._num_passes, self._num_read, self._read_ms = 0, 0, 0.0
        self._run_ahead = RunAhead(AHEAD, lead_ms)
        self._waiting: deque[Tensor | None] = deque()  # of each pass that was not read, its log-probabilities
        self._copies = _copy_stream(device.index)
        self._current = torch.cuda.current_stream(device)

    def push(self, buffer: TokenBuffer, logprobs: Tensor | None, is_full: bool) -> list[StepTokens]:
        arrived, rows = self._collect(keep=self._run_ahead.passes(is_full) - 1), None
        slot, current = self._num_passes % AHEAD, self._current
        # torch.cuda.current_stream takes Python longer than the launch of a graph (LOG).
        if stream_of(buffer.log) != current.cuda_stream:
            current = self._current = torch.cuda.current_stream(buffer.log.device)
        self._launched[slot].record(current)
        self._copies.wait_event(self._launched[slot])
        torch.cuda.set_stream(self._copies)
        try:
            self._slots[slot].copy_(buffer.log[self._num_passes % len(buffer.log)], non_blocking=True)
            if logprobs is not None:  # pinned memory is kept by PyTorch, and comes again
                rows = torch.empty(logprobs.shape[1:], dtype=logprobs.dtype, pin_memory=True)
                rows.copy_(logprobs[self._num_passes % len(logprobs)], non_blocking=True)
            self._copied[self._num_passes % len(self._copied)].record(self._copies)
        finally:
            torch.cuda.set_stream(current)
        self._num_passes += 1
        self._waiting.append(rows)
        return arrived

    def drain(self) -> list[StepTokens]:
        return self._collect(keep=0)

    def _collect(self, keep: int) -> list[StepTokens]:
        """Take what is there, and wait until no more than so many are not."""
        arrived = []
        while self._waiting:
            number, events = self._num_read, self._copied
            copied = events[number % len(events)]
            if not copied.query():
                if len(self._waiting) <= keep:
                    break
                copied.synchronize()
            rows, self._num_read = self._waiting.popleft(), number + 1
            pass_ms = (events[(number - 1) % len(events)] if number else self._start).elapsed_time(copied)
            self._run_ahead.read(pass_ms)
            self._read_ms += pass_ms
            t_ms = self._before_ms + self._read_ms - self._clock.setup_ms
            ids = self._slots[number % AHEAD].tolist()
            arrived.append(StepTokens(ids, t_ms, None if rows is None else rows.tolist()))
        return arrived


@cache
def _copy_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


def open_stream(clock: RequestClock, device: torch.device, num_rows: int, lead_ms: float) -> TokenStream:
    """The stream that suits the device; opened before any work there. `lead_ms` is of passes that a device is given."""
    return PinnedRing(clock, device, num_rows, lead_ms) if passes_ahead(device) else HostStream(clock)


def passes_ahead(device: torch.device) -> int:
    """How many passes a device is given at most before the host has read the first of them."""
    return AHEAD if device.type == "cuda" else 0
