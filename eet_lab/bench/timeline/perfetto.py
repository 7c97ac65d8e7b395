"""A trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open: Chrome trace events, a process a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eet_lab.bench.timeline.spans import Span, Timeline
from eet_lab.errors import ResultError
from eet_lab.paths import write_whole

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
