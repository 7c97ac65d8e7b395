"""What one decode step calls, op by op, timed on a real decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import wraps
from statistics import median
from typing import Any, NamedTuple

import torch

from eet_lab.bench.step import decode_calls
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import Model
from eet_lab.parts import Ops, Parts
from eet_lab.technique import Recipe, registry

LAYER = ("norm_linear", "attention", "linear_residual", "norm_linear", "linear_residual")
"""The ops of a layer, in order; the first attends to queries, keys and values, the second is the FFN's."""


def everything_on() -> Recipe:
    """All that is not lossy, as on a GPU, whether or not there is one."""
    return Recipe.parse(",".join(name for name, t in registry().items() if t.numerics != "lossy"), "cuda")


class Timed(NamedTuple):
    """An op of a step: when it began and how long it took, in microseconds, and the bytes that it has to move."""

    op: str
    start_us: float
    took_us: float
    num_bytes: int


def timed(model: Model, parts: Parts, prompt: Sequence[int], new_tokens: int = 24) -> list[Timed]:
    """Each op of a decode step of one row, in order, timed while the engine runs: the medians of some steps.

    On a GPU by events around each op, so that what is seen is when the device had got there.
    """
    marks: list[tuple[str, Any, Any]] = []
    clocks: dict[str, tuple[Callable, Callable]] = {"cuda": (_gpu_mark, _gpu_us), "cpu": (time.perf_counter, _cpu_us)}
    mark, between = clocks[model.device]

    def watched(name: str, op: Callable) -> Callable:
        @wraps(op)
        def run(*args: Any, **keywords: Any) -> Any:
            if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):  # a rehearsal
                return op(*args, **keywords)
            start = mark()
            result = op(*args, **keywords)
            marks.append((name.removeprefix("masked_"), start, mark()))
            return result

        return run

    ops = Ops(**{f.name: watched(f.name, getattr(parts.ops, f.name)) for f in fields(parts.ops)})
    Engine(model.decoder, replace(parts, ops=ops)).generate([list(prompt)], Settings(max_new_tokens=new_tokens))
    steps = _steps(marks, between)[-new_tokens + 4 :]
    moved = decode_calls(model.config, parts, 1, len(prompt) + new_tokens // 2, model.decoder.dtype)
    sizes = [call.read_bytes for call in moved if call.op != "torch"]
    step, end_us = list[Timed](), 0.0
    for size, *each in zip(sizes, *steps, strict=True):
        took_us, start_us = median(mark.took_us for mark in each), end_us + median(mark.gap_us for mark in each)
        step.append(Timed(each[0].op, start_us, took_us, size))
        end_us = start_us + took_us
    return step


def _gpu_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _gpu_us(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _cpu_us(start: float, end: float) -> float:
    return (end - start) * 1e6


class _Mark(NamedTuple):
    op: str
    gap_us: float  # since the end of the op before, within the step
    took_us: float


def _steps(marks: Sequence[tuple[str, Any, Any]], between: Callable[[Any, Any], float]) -> list[list[_Mark]]:
    """The ops of each step, which begins with its embedding."""
    steps: list[list[_Mark]] = []
    before: Any = None
    for op, start, end in marks:
        if op == "embed":
            steps.append([])
            before = start
        steps[-1].append(_Mark(op, between(before, start), between(start, end)))
        before = end
    return steps
