"""The timeline of one step, of decoding or of training: its spans on the host and on the device, and files of them.
Times are microseconds.

Beside a result they are whole numbers in columns, and each name once: about 14 bytes a span. A trace opens in Perfetto
(ui.perfetto.dev) and in chrome://tracing: Chrome trace events, a process a recipe.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from msgspec import Meta

from eet_lab import codec
from eet_lab.bench.launches import Call, num_launches
from eet_lab.bench.results import read_result, written
from eet_lab.codec import Count, content_of
from eet_lab.errors import ResultError
from eet_lab.words import plain

Lane = Literal["host", "device"]
Kind = Literal[
    "phase", "op", "call", "launch", "wait", "memory", "own kernel", "gemm", "torch kernel", "copy", "other kernel"
]
"""What a span is. On both: a phase of a training step. On the host: an op of the engine; within it a call of PyTorch
(on a CPU) or a launch (on a GPU), a wait for the device, or memory asked of the driver. On the device: whose kernel it
is; copies hold fills as well.
"""

MOST_SPANS = 5_000
"""The most spans of a timeline, whether it was just taken or comes from a file."""

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


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One step of `num_rows` rows, alone on the device. One that decodes reads `num_columns` columns of the KV cache,
    and one that trains so many tokens.

    It begins with its first op on the host and ends, after `step_us`, with what finishes last. Watching makes the host
    slower: such a step took `unprofiled_us` without the profiler, and shares are told of that.
    `num_launches` is what the host handed to the device (a graph is one), on a CPU the calls of PyTorch.
    `device_busy_us` counts kernels that overlap once; None without a device. `num_left_out` spans were too many.
    `source` is who watched, `origin` where, with which versions and when, `remark` what could not be seen.
    """

    recipe: Text
    device_kind: Literal["cpu", "cuda"]
    source: Text
    origin: Text
    num_rows: Count
    num_columns: Count
    step_us: Us
    unprofiled_us: Annotated[float, Meta(gt=0, le=LONGEST_US)]
    num_launches: Count
    device_busy_us: Us | None
    num_left_out: Count
    remark: Text
    stage: Literal["decode", "train"] = "decode"


@dataclass(frozen=True, kw_only=True)
class Timeline(Facts):
    """A step and its spans."""

    spans: tuple[Span, ...]

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


PER_US = 10
"""Starts and durations are kept in tenths of a microsecond."""

LONGEST_US = 10**9

T = TypeVar("T")
Column = Annotated[tuple[T, ...], Meta(max_length=MOST_SPANS)]
Text = Annotated[str, Meta(max_length=2_000)]
Us = Annotated[float, Meta(ge=0, le=LONGEST_US)]
Tenths = Annotated[int, Meta(ge=0, le=LONGEST_US * PER_US)]
Bytes = Annotated[int, Meta(ge=0, lt=2**53)]
"""Which a browser's numbers hold, too."""


@dataclass(frozen=True)
class Name:
    """What many spans share."""

    lane: Lane
    kind: Kind
    name: Text
    full: Text
    op: Text
    num_bytes: Bytes | None


@dataclass(frozen=True, kw_only=True)
class Packed(Facts):
    """A `Timeline` with its spans as columns, one number each: which of `names`, the tenths of a microsecond from the
    span before to its start, those that it took, and how many places back its launch is (0: unknown).
    """

    names: Column[Name]
    name: Column[Count]
    start: Column[int]
    dur: Column[Tenths]
    launch: Column[Count]


FACTS = [f.name for f in fields(Facts)]
TIMES = ("step_us", "unprofiled_us", "device_busy_us")


def encode(timelines: Timelines) -> dict[str, Any]:
    """What `json` can write, to be kept beside a result: `result.save(path, timeline=encode(timelines))`."""
    return {name: codec.encode(pack(each)) for name, each in timelines._asdict().items()}


def decode(data: Any) -> Timelines:
    """What `encode` made, as it comes from a file; ResultError that names what is wrong with it."""
    try:
        if not isinstance(data, dict) or set(data) != set(Timelines._fields):
            raise ValueError("timeline is no object with baseline and selection")
        each = {name: codec.decode(Packed, data[name], f"timeline.{name}") for name in data}
        return Timelines(**{name: unpack(packed, f"timeline.{name}") for name, packed in each.items()})
    except ValueError as error:
        raise ResultError(f"The timeline is damaged: {error}. Take it again.") from error


def read_timelines(path: str | Path) -> Timelines | None:
    """Those that are kept beside a saved result; None where there are none, ResultError for a file that is damaged."""
    return timelines_of(read_result(content_of(path), str(path))[1])


def timelines_of(beside: Mapping[str, Any]) -> Timelines | None:
    """Those among what `read_result` found beside a result; ResultError where they are damaged."""
    data = beside.get("timeline")
    return None if data is None else decode(data)


def pack(timeline: Timeline) -> Packed:
    """The timeline as columns."""
    names: dict[Name, int] = {}
    columns: dict[str, list[int]] = {"name": [], "start": [], "dur": [], "launch": []}
    before = 0
    for place, span in enumerate(timeline.spans):
        shared = Name(span.lane, span.kind, span.name, span.full, span.op, span.num_bytes)
        start = round(span.start_us * PER_US)
        columns["name"].append(names.setdefault(shared, len(names)))
        columns["start"].append(start - before)
        columns["dur"].append(round(span.dur_us * PER_US))
        columns["launch"].append(0 if span.launch is None else place - span.launch)
        before = start
    facts: dict[str, Any] = {name: getattr(timeline, name) for name in FACTS}
    facts |= {name: round(facts[name], 1) for name in TIMES if facts[name] is not None}
    facts |= {name: tuple(column) for name, column in columns.items()}
    return Packed(**facts, names=tuple(names))


def unpack(packed: Packed, where: str = "timeline") -> Timeline:
    """The timeline again; ValueError that names what cannot be."""
    _check(packed, where)
    spans, start = list[Span](), 0
    columns = zip(packed.name, packed.start, packed.dur, packed.launch, strict=True)
    for place, (number, gap, dur, back) in enumerate(columns):
        name, start = packed.names[number], start + gap
        if not abs(start) <= LONGEST_US * PER_US:
            raise ValueError(f"{where}.start[{place}] leads to {plain(start / PER_US)} us")
        launch = place - back if back else None
        if launch is not None and spans[launch].kind != "launch":
            raise ValueError(f"{where}.launch[{place}] leads to a {spans[launch].kind}, which is no launch")
        shared: dict[str, Any] = {f.name: getattr(name, f.name) for f in fields(name)}
        spans.append(Span(**shared, start_us=start / PER_US, dur_us=dur / PER_US, launch=launch))
    facts: dict[str, Any] = {name: getattr(packed, name) for name in FACTS}
    return Timeline(**facts, spans=tuple(spans))


def _check(packed: Packed, where: str) -> None:
    """What the types do not tell, and the figure and the trace file rely on: that the columns fit each other."""
    num, num_names = len(packed.name), len(packed.names)
    for column in ("start", "dur", "launch"):
        length = len(getattr(packed, column))
        if length != num:
            raise ValueError(f"{where}.{column} has {length:,} numbers, not {num:,} as name has")
    for place, (number, back) in enumerate(zip(packed.name, packed.launch, strict=True)):
        if number >= num_names:
            raise ValueError(f"{where}.name[{place}] is {number}, not one of {num_names} names")
        if back > place:
            raise ValueError(f"{where}.launch[{place}] is {back}, not 0 to {place}")


THREADS = {"host": 1, "device": 2}


def write_trace(path: str | Path, timelines: Sequence[Timeline]) -> Path:
    """Write them one below the other, each from 0 on; ResultError where the file cannot be written."""
    return written(path, trace_text(timelines), "trace")


def trace_text(timelines: Sequence[Timeline]) -> str:
    """The file's content, for a download."""
    events = [event for pid, timeline in enumerate(timelines, 1) for event in _events(timeline, pid)]
    content = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"


def _events(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    """Names first, then each span as a complete event, and an arrow from each launch to its first kernel."""
    yield _named("process_name", pid, 0, name=timeline.recipe)
    yield _named("process_labels", pid, 0, labels=f"{timeline.source}; {timeline.origin}")
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    lanes = {span.lane for span in timeline.spans}
    for lane, tid in THREADS.items():
        if lane in lanes:
            yield _named("thread_name", pid, tid, name=lane)
            yield _named("thread_sort_index", pid, tid, sort_index=tid)
    # The flow's arrow ends where a kernel begins; a graph's one launch has many.
    begun: set[int] = set()
    for span in timeline.spans:
        yield _complete(span, pid)
        if span.launch is not None and span.launch not in begun:
            begun.add(span.launch)
            yield from _arrow(timeline.spans[span.launch], span, pid, f"{pid}.{span.launch}")


def _complete(span: Span, pid: int) -> dict[str, Any]:
    known = {"full name": span.full, "op": span.op, "bytes": span.num_bytes}
    return {
        "ph": "X",
        "cat": span.kind,
        "name": span.name,
        "pid": pid,
        "tid": THREADS[span.lane],
        "ts": round(span.start_us, 3),
        "dur": round(span.dur_us, 3),
        "args": {key: value for key, value in known.items() if value not in ("", None)},
    }


def _arrow(launch: Span, kernel: Span, pid: int, number: str) -> Iterator[dict[str, Any]]:
    flow = {"cat": "launch", "name": "launch", "id": number, "pid": pid}
    yield {"ph": "s", **flow, "tid": THREADS[launch.lane], "ts": round(launch.start_us, 3)}
    yield {"ph": "f", "bp": "e", **flow, "tid": THREADS[kernel.lane], "ts": round(kernel.start_us, 3)}


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
