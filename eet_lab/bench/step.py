"""What a decode step launches and reads, told without a GPU: its ops are rehearsed, and each op's case declares both.

B rows, T tokens, K columns of the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eet_lab.bench.launches import is_work
from eet_lab.engine.engine import Engine
from eet_lab.engine.rehearse import moved, new_cache
from eet_lab.engine.settings import Settings
from eet_lab.models.config import Config
from eet_lab.models.weights import random_decoder
from eet_lab.ops.records import OPS
from eet_lab.ops.types import State, Step, fresh
from eet_lab.parts import Ops, Parts
from eet_lab.parts.prompts import decode_step


class Call(NamedTuple):
    """One op of a step. `launches` is None for plain PyTorch, which decides for itself."""

    op: str
    launches: int | None
    read_bytes: int


def decode_calls(
    config: Config, parts: Parts, batch: int, context: int, dtype: torch.dtype = torch.float16
) -> tuple[Call, ...]:
    """The ops of the decode step of `batch` rows that reads `context` columns, its own among them, in order.

    What plain PyTorch does between the ops, such as building a mask, is a call named "torch". Nothing is computed.
    Where rows are too many, or their channels, for a linear to stream its weights (`ops.cuda.linear`: on an H200 more
    than 13 rows of GPT-2 XL in 16 bits, and always more than 16), its product is one launch of cuBLAS, beside ours.
    Without a GPU the limits are an H200's.
    """
    engine = Engine(random_decoder(config, 0, torch.device("meta"), dtype), parts)
    state, first = parts.prompts([[0] * (context - 1)] * batch, 1)
    step = moved(decode_step(state, first.num_pad, first.spans, context), torch.device("meta"))
    return Recorder().decoded(engine, step, moved(state, torch.device("meta")))


def num_launches(calls: tuple[Call, ...]) -> int | None:
    """Of all calls together; None where plain PyTorch is among them."""
    known = [call.launches for call in calls if call.launches is not None]
    return sum(known) if len(known) == len(calls) else None


def num_bytes(calls: tuple[Call, ...]) -> int:
    """Bytes that a step moves, each once an op: weights, keys, values and activations."""
    return sum(call.read_bytes for call in calls)


def declared_launches(name: str, op: Callable) -> int | None:
    """What the op in a slot declares that it launches; None for plain PyTorch, and for an op of someone else."""
    return OPS[name].launches if hasattr(op, "kernels") and op.__name__ == name else None


class Recorder(TorchDispatchMode):
    """Notes ops, and what PyTorch computes between them; views and new memory are no work for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._in_op = False

    def decoded(self, engine: Engine, step: Step, state: State) -> tuple[Call, ...]:
        """The ops of one decode step of an engine, with a KV cache that is as long as the step needs."""
        parts, device = engine.parts, step.ids.device
        slots = {f.name: getattr(parts.ops, f.name) for f in fields(parts.ops)}
        ops: Any = Ops(**{name: partial(self.run, name, op) for name, op in slots.items()}).bind(fresh)
        cache = new_cache(engine.model, parts)
        cache.open([0] * len(step.spans), step.extent)
        sampling = Settings().sampling(len(step.spans), device)
        with torch.inference_mode(), self:
            hidden = parts.forward(engine.model, ops, partial(parts.mask, empty=fresh), list(cache), step)
            ops.advance(state, engine.task(engine.model, ops, hidden, step, sampling), step.count)
        return tuple(self.calls)

    def run(self, name: str, op: Callable, *args: Any, **keywords: Any) -> Any:
        """An op by the name of its slot."""
        record, described = OPS[name], {key: value for key, value in keywords.items() if key != "empty"}
        launches = declared_launches(name, op)
        if launches is not None:
            launches += record.more_launches(*args, **described)
        self.calls.append(Call(name, launches, record.read_bytes(*args, **described)))
        if name == "advance":  # it changes its state and gives nothing, so nothing is learned by running it
            return None
        self._in_op = True
        try:
            return op(*args, **keywords)
        finally:
            self._in_op = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._in_op and is_work(function):
            self.calls.append(Call("torch", None, 0))
        return function(*args, **(kwargs or {}))


def around_each(ops: Ops, around: Callable[[str], AbstractContextManager]) -> Ops:
    """The same ops, each run within `around(the name of its slot)`; a rehearsal on meta tensors is not."""

    def within(name: str, op: Callable) -> Callable:
        @wraps(op)
        def run(*args: Any, **keywords: Any) -> Any:
            if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
                return op(*args, **keywords)
            with around(name):
                return op(*args, **keywords)

        return run

    return Ops(**{f.name: within(f.name, getattr(ops, f.name)) for f in fields(ops)})
