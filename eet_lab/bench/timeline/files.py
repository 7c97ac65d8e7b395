"""Timelines in files: beside a result, and as traces for Perfetto.

Beside a result they are whole numbers in columns, and each name once: about 14 bytes a span. A trace opens in Perfetto
(ui.perfetto.dev) and in chrome://tracing: Chrome trace events, a process a recipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from eet_lab import codec
from eet_lab.bench.files import content_of, read_result
from eet_lab.bench.timeline.spans import MOST_SPANS, Kind, Lane, Span, Timeline, Timelines
from eet_lab.codec import Count
from eet_lab.errors import ResultError
from eet_lab.paths import write_whole
from eet_lab.words import plain

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


@dataclass(frozen=True)
class Packed:
    """A `Timeline` with its spans as columns, one number each: which of `names`, the tenths of a microsecond from the
    span before to its start, those that it took, and how many places back its launch is (0: unknown).
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
    names: Column[Name]
    name: Column[Count]
    start: Column[int]
    dur: Column[Tenths]
    launch: Column[Count]


FACTS = [f.name for f in fields(Timeline) if f.name != "spans"]
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
    path = Path(path)
    try:
        write_whole(path, trace_text(timelines))
    except OSError as error:
        raise ResultError(f"The trace cannot be written to {path}: {error.strerror}. Choose another place.") from error
    return path


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
