"""What one decode step calls, op by op, counted on a tiny decoder on the CPU; and what a call costs there.

L layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch

from eet_lab.bench.step import Call, Recorder, declared_launches, decode_calls
from eet_lab.engine.engine import Engine
from eet_lab.models.config import PRESETS, Config
from eet_lab.models.weights import random_decoder
from eet_lab.ops import reference
from eet_lab.ops.int8 import dequantized
from eet_lab.ops.records import OPS
from eet_lab.parts import Parts
from eet_lab.parts.prompts import decode_step

Counts = tuple[tuple[str, int], ...]


class StepCalls(NamedTuple):
    """How often something is handed to the device: by each op of a layer, and in a whole step."""

    layer: Counts
    layers: int
    beside: int

    @property
    def total(self) -> int:
        return self.layers * sum(count for _, count in self.layer) + self.beside


def counted(parts: Parts, lengths: Sequence[int], num_layers: int, like: Config = PRESETS["gpt2"]) -> StepCalls:
    """What a decode step of rows with prompts of `lengths` tokens calls, in a decoder of `num_layers` layers.

    It is of the family of `like`.

    PyTorch's calls are counted while they happen, on the CPU, less views and new memory; ours count what their cases
    declare, and where an op over kernels leaves something to PyTorch, what its reference calls. Sizes do not matter,
    only how many rows there are and which are equally long, so the decoder is tiny. On a GPU some calls of PyTorch
    are two kernels: its profiler counts up to a fifth more.
    """
    places = {length: place for place, length in enumerate(sorted(set(lengths)), 2)}
    one, two = (_calls(parts, tuple(places[length] for length in lengths), num, like) for num in (1, 2))
    layer = tuple((op, count) for op, count in one if op in ("norm_linear", "linear_residual", "attention"))
    per_layer = sum(count for _, count in layer)
    beside = sum(count for _, count in two) - 2 * per_layer
    return StepCalls(layer, num_layers, beside)


def num_kernels(parts: Parts, lengths: Sequence[int], config: Config, dtype: torch.dtype = torch.float16) -> int:
    """Of a decode step of a model, as `counted`; but one kernel for most of a layer where it takes that, and more than
    one an op where rows or channels are too many to stream its weights, or in float32 (`decode_calls`).
    """
    layers, found = config.num_layers, counted(parts, lengths, config.num_layers, config)
    one_layer = decode_calls(replace(config, num_layers=1), parts, len(lengths), max(lengths) + 1, dtype)
    if "rest_of_layer" in (call.op for call in one_layer):
        return found.beside + 2 * layers + 1  # the first layer's queries, keys and values are on their own
    more = [(call.op, call.launches - (OPS[call.op].launches or 0)) for call in one_layer if call.launches is not None]
    return found.total + sum(count if op == "next_token" else count * layers for op, count in more)


def is_launched_by_python(parts: Parts) -> bool:
    """Kernel by kernel, and not as one graph."""
    return not getattr(parts.launch, "is_captured", False)


def _calls(parts: Parts, lengths: tuple[int, ...], num_layers: int, like: Config) -> Counts:
    device = torch.device("cpu")
    column = max(lengths)
    sizes: dict[str, Any] = {"hidden_size": 32, "ffn_size": 64, "vocab_size": 64, "bos_id": 0, "eos_id": None}
    sizes |= {"num_heads": 2, "num_kv_heads": 1 if like.num_kv_heads < like.num_heads else 2, "head_dim": 16}
    config = replace(like, num_layers=num_layers, context=column + 2, tied_head=True, **sizes)
    engine = Engine(random_decoder(config, 0, device, torch.float32), parts)
    state, first = parts.prompts([[1] * length for length in lengths], 2)
    state.columns.fill_(column)
    found = _Counter().decoded(engine, decode_step(state, first.num_pad, first.spans, column + 1), state)
    return tuple((call.op.removeprefix("masked_"), call.launches or 0) for call in found)


class _Counter(Recorder):
    """Runs every op, those over kernels by their reference, and notes how much each of them launches."""

    def run(self, name: str, op: Callable, *args: Any, **keywords: Any) -> Any:
        before = len(self.calls)
        ours = hasattr(op, "kernels")
        result = (getattr(reference, name) if ours else op)(*args, **keywords)
        inside = len(self.calls) - before
        del self.calls[before:]
        declared = declared_launches(name, op)
        self.calls.append(Call(name, inside if declared is None else declared, 0))
        return result

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.calls)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.calls[before:] = [call._replace(launches=1) for call in self.calls[before:]]
        return result


@cache
def call_us() -> float:
    """What one call of PyTorch costs on the CPU when there is next to nothing to compute: the median of a few, once."""
    number = torch.zeros(1)
    tries = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(500):
            number.add_(0)
        tries.append((time.perf_counter() - start) / 500 * 1e6)
    return median(tries)


@cache
def expansion_ns() -> float:
    """What plain PyTorch takes on the CPU to make a weight of one int8 number: the median of a few matrices, once."""
    whole, scale = torch.ones(1024, 1024, dtype=torch.int8), torch.ones(1024, 1)
    tries = []
    for _ in range(9):
        start = time.perf_counter()
        dequantized(whole, scale, out=torch.empty(whole.shape))
        tries.append((time.perf_counter() - start) / whole.numel() * 1e9)
    return median(tries)
