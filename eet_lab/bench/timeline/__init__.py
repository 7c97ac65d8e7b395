"""The timeline of one decode step: what the host launched when, and when the device ran it."""

from __future__ import annotations

from eet_lab.bench.timeline.files import decode, encode, read_timelines, timelines_of, trace_text, write_trace
from eet_lab.bench.timeline.spans import Span, Timeline, Timelines
from eet_lab.bench.timeline.steps import step_timeline, timelines

__all__ = [
    "Span",
    "Timeline",
    "Timelines",
    "decode",
    "encode",
    "read_timelines",
    "step_timeline",
    "timelines",
    "timelines_of",
    "trace_text",
    "write_trace",
]
