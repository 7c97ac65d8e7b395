"""The bytes that each op of a step has to move, told by its case, on the spans that ran it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from eet_lab.bench.step import Call, num_launches
from eet_lab.bench.timeline.spans import Span


def with_bytes(spans: Sequence[Span], calls: Sequence[Call]) -> tuple[Span, ...]:
    """The same spans with the bytes of their ops; `calls` are those of the step, in order (`bench.step.decode_calls`).

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
