"""What one decode step calls, op by op: counted on a tiny decoder, and timed on a real one.

B rows, L layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache, wraps
from statistics import median
from typing import Any, NamedTuple

import torch

from eet_lab.bench.step import LAUNCHES, Call, Recorder, decode_calls
from eet_lab.engine.engine import Engine
from eet_lab.engine.prompts import decode_step
from eet_lab.engine.settings import Settings
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.weights import random_decoder
from eet_lab.ops import reference
from eet_lab.parts import Ops, Parts
from eet_lab.technique import Recipe, registry

LAYER = ("norm_linear", "attention", "linear_residual", "norm_linear", "linear_residual")
"""The ops of a layer, in order; the first attends to queries, keys and values, the second is the FFN's."""

Counts = tuple[tuple[str, int], ...]


class StepCalls(NamedTuple):
    """How often something is handed to the device: by each op of a layer, and in a whole step."""

    layer: Counts
    layers: int
    beside: int

    @property
    def total(self) -> int:
        return self.layers * sum(count for _, count in self.layer) + self.beside


def counted(parts: Parts, lengths: Sequence[int], num_layers: int) -> StepCalls:
    """What a decode step of rows with prompts of `lengths` tokens calls, in a decoder of `num_layers` layers.

    PyTorch's calls are counted while they happen, on the CPU, less views and new memory; ours count what their cases
    declare, and where an op over kernels leaves something to PyTorch, what its reference calls. Sizes do not matter,
    only how many rows there are and which are equally long, so the decoder is tiny. On a GPU some calls of PyTorch
    are two kernels: its profiler counts up to a fifth more.
    """
    places = {length: place for place, length in enumerate(sorted(set(lengths)), 2)}
    one, two = (_calls(parts, tuple(places[length] for length in lengths), num) for num in (1, 2))
    layer = tuple((op, count) for op, count in one if op in ("norm_linear", "linear_residual", "attention"))
    per_layer = sum(count for _, count in layer)
    beside = sum(count for _, count in two) - 2 * per_layer
    return StepCalls(layer, num_layers, beside)


@cache
def num_kernels(parts: Parts, lengths: Sequence[int], config: Config) -> int:
    """Of a decode step of a model in 16 bits, as `counted`; but one kernel for most of a layer where it takes that."""
    layers, found = config.num_layers, counted(parts, lengths, config.num_layers)
    one_layer = decode_calls(replace(config, num_layers=1), parts, len(lengths), max(lengths) + 1)
    if "rest_of_layer" in (call.op for call in one_layer):
        return found.beside + 2 * layers + 1  # the first layer's queries, keys and values are on their own
    return found.total


@cache
def _calls(parts: Parts, lengths: tuple[int, ...], num_layers: int) -> Counts:
    device = torch.device("cpu")
    engine = Engine(random_decoder(Config(num_layers, 32, 2, 64, 64, 64), 0, device, torch.float32), parts)
    column = max(lengths)
    state, first = parts.prompts([[1] * length for length in lengths], 2)
    state.column.fill_(column)
    found = _Counter().decoded(engine, decode_step(state, first.num_pad, first.spans, column + 1), state)
    return tuple((call.op.removeprefix("masked_"), call.launches or 0) for call in found)


def everything_on() -> Recipe:
    """All that is not lossy, as on a GPU, whether or not there is one."""
    return Recipe.parse(",".join(name for name, t in registry().items() if t.numerics != "lossy"), "cuda")


class _Counter(Recorder):
    """Runs every op, those over kernels by their reference, and notes how much each of them launches."""

    def run(self, name: str, op: Callable, *args: Any, **keywords: Any) -> Any:
        before = len(self.calls)
        ours = hasattr(op, "kernels")
        result = (getattr(reference, name) if ours else op)(*args, **keywords)
        inside = len(self.calls) - before
        del self.calls[before:]
        self.calls.append(Call(name, LAUNCHES.get(op.__name__, inside) if ours else inside, 0))
        return result

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.calls)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.calls[before:] = [call._replace(launches=1) for call in self.calls[before:]]
        return result


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


def call_us() -> float:
    """What one call of PyTorch costs on the CPU when there is next to nothing to compute: the median of a few."""
    number = torch.zeros(1)
    tries = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(500):
            number.add_(0)
        tries.append((time.perf_counter() - start) / 500 * 1e6)
    return median(tries)
