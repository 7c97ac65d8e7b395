"""The spans of a decode step, on the host and on the device, and what they say together. Times are microseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from eet_lab.bench.launches import Call, num_launches

Lane = Literal["host", "device"]
Kind = Literal["op", "call", "launch", "wait", "memory", "own kernel", "gemm", "torch kernel", "copy", "other kernel"]
"""What a span is. On the host: an op of the engine; within it a call of PyTorch (on a CPU) or a launch (on a GPU), a
wait for the device, or memory asked of the driver. On the device: whose kernel it is; copies hold fills as well."""

MOST_SPANS = 5_000
"""The most spans of a timeline, whether it was just taken or comes from a file."""

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
        """The share of a step without the profiler, from 0 to 1, in which the device had something to do."""
        return None if self.device_busy_us is None else min(1.0, self.device_busy_us / self.unprofiled_us)


class Timelines(NamedTuple):
    """The timelines of the baseline and of the selection, for the same prompts."""

    baseline: Timeline
    selection: Timeline


def covered_us(spans: Iterable[Span]) -> float:
    """The time in which at least one of them runs."""
    covered, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_us):
        covered += max(0.0, span.end_us - max(until, span.start_us))
        until = max(until, span.end_us)
    return covered


def with_bytes(spans: Sequence[Span], calls: Sequence[Call]) -> tuple[Span, ...]:
    """The same spans with the bytes of their ops; `calls` are those of the step, in order (`decode_calls`).

    An op's bytes are a kernel's where it is the only one. Where names or numbers differ, nothing is known.
    """
    spans, calls_of_ops = list(spans), [call for call in calls if call.op != "torch"]
    ops = [place for place, span in enumerate(spans) if span.kind == "op"]
    if [spans[place].op for place in ops] == [call.op for call in calls_of_ops]:
        for place, call in zip(ops, calls_of_ops, strict=True):
            spans[place] = replace(spans[place], num_bytes=call.read_bytes)
        _give_kernels(spans, ops)
    elif not ops:
        _give_in_order(spans, calls)
    return tuple(spans)


def _give_kernels(spans: list[Span], ops: Sequence[int]) -> None:
    """Each op's bytes to its kernel, by when its launch was on the host."""
    starts = [spans[place].start_us for place in ops]
    kernels: dict[int, list[int]] = {}
    for place, span in enumerate(spans):
        if span.lane == "device" and span.launch is not None and span.op:
            inside = bisect_right(starts, spans[span.launch].start_us) - 1
            kernels.setdefault(ops[inside], []).append(place)
    for op, places in kernels.items():
        if len(places) == 1:
            spans[places[0]] = replace(spans[places[0]], num_bytes=spans[op].num_bytes)


def _give_in_order(spans: list[Span], calls: Sequence[Call]) -> None:
    """A graph's kernels run in the order of the ops that it was captured from."""
    kernels = [place for place, span in enumerate(spans) if span.lane == "device"]
    kernels.sort(key=lambda place: spans[place].start_us)
    if num_launches(tuple(calls)) != len(kernels):
        return
    after = iter(kernels)
    for call in calls:
        for _ in range(call.launches or 0):
            place = next(after)
            alone = call.read_bytes if call.launches == 1 else spans[place].num_bytes
            spans[place] = replace(spans[place], op=call.op, num_bytes=alone)
