"""The spans of a decode step, on the host and on the device, and what they say together. Times are microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Lane = Literal["host", "device"]
Kind = Literal["op", "call", "launch", "wait", "memory", "own kernel", "gemm", "torch kernel", "copy", "other kernel"]
"""On the host: an op of the engine; within it a call of PyTorch (on a CPU) or what is handed to the device (on a GPU),
a wait for the device, and memory asked of the driver. On the device: whose kernel it is; copies hold fills as well."""

MOST_SPANS = 5_000
"""Of a timeline, whether it was just taken or comes from a file."""

HOST: tuple[Kind, ...] = ("op", "call", "launch", "wait", "memory")
DEVICE: tuple[Kind, ...] = ("own kernel", "gemm", "torch kernel", "copy", "other kernel")


@dataclass(frozen=True)
class Span:
    """Something that took time. `name` is what a reader knows it by, `full` all that the profiler says.

    `op` is the engine's op that it belongs to, and `num_bytes` what it has to move; empty and None where unknown.
    `launch` is the place among the timeline's spans of the launch that this kernel came from, where that is known.
    """

    lane: Lane
    kind: Kind
    name: str
    full: str
    start_us: float
    dur_us: float
    op: str = ""
    num_bytes: int | None = None
    launch: int | None = None

    @property
    def end_us(self) -> float:
        return self.start_us + self.dur_us


@dataclass(frozen=True)
class Timeline:
    """One decode step of `num_rows` rows that reads `num_columns` columns of the KV cache, alone on the device.

    It begins with its first op on the host and ends, after `step_us`, with what finishes last. Watching makes the host
    slower: such a step took `unprofiled_us` without the profiler, and shares are told of that.
    `num_launches` is what the host handed to the device (a graph is one), on a CPU the calls of PyTorch.
    `device_busy_us` counts kernels that overlap once; None without a device. `num_left_out` spans were too many.
    `source` is who watched, `origin` where, with which versions and when, `remark` what could not be seen.
    """

    recipe: str
    device_kind: Literal["cpu", "cuda"]
    source: str
    origin: str
    num_rows: int
    num_columns: int
    spans: tuple[Span, ...]
    step_us: float
    unprofiled_us: float
    num_launches: int
    device_busy_us: float | None
    num_left_out: int = 0
    remark: str = ""

    @property
    def busy_share(self) -> float | None:
        """Of the step as it is without the profiler, from 0 to 1: how long the device had something to do."""
        return None if self.device_busy_us is None else min(1.0, self.device_busy_us / self.unprofiled_us)


class Timelines(NamedTuple):
    """Of the same prompts, the baseline and the selection."""

    baseline: Timeline
    selection: Timeline


def covered_us(spans: Iterable[Span]) -> float:
    """The time in which at least one of them runs."""
    covered, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_us):
        covered += max(0.0, span.end_us - max(until, span.start_us))
        until = max(until, span.end_us)
    return covered
