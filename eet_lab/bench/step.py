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
from eet_lab.ops.cases import CASES
from eet_lab.ops.cuda import linear
from eet_lab.ops.layer_cases import LAYER_CASES, LayerShape
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape
from eet_lab.ops.token_cases import TOKEN_CASES, AdvanceShape, EmbedShape
from eet_lab.ops.types import NO_EXTRAS, Extras, KVLayer, Layer, Linear, Norm, Sampling, Spec, State, Step, fresh
from eet_lab.parts import Ops, Parts
from eet_lab.parts.prompts import decode_step

LAUNCHES = {
    case.op: case.launches for case in (*CASES, *LAYER_CASES, *TOKEN_CASES) if not case.name.startswith("prefill")
}


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
        ours = hasattr(op, "kernels")
        launches = LAUNCHES.get(op.__name__) if ours else None
        described = {key: value for key, value in keywords.items() if key != "empty"}
        if launches is not None and name in MORE_LAUNCHES:
            launches += MORE_LAUNCHES[name](*args, **described)
        self.calls.append(Call(name, launches, BYTES[name](*args, **described)))
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


def _linear_bytes(w: Linear, shape: Shape, itemsize: int) -> int:
    """With what an int8 weight is smaller than the shape knows."""
    scale = 0 if w.scale is None else w.scale.nbytes
    return shape.read_bytes(itemsize) - w.weight.numel() * itemsize + w.weight.nbytes + scale


def _norm_linear(x: torch.Tensor, norm_w: Norm, w: Linear, act: str | None = None) -> int:
    return _linear_bytes(w, LinearShape(len(x), len(w.weight), x.shape[1], act), x.itemsize)


def _linear_residual(x: torch.Tensor, w: Linear, residual: torch.Tensor) -> int:
    return _linear_bytes(w, LinearShape(len(x), len(w.weight), x.shape[1], residual=True), x.itemsize)


def _rest_of_layer(attended: torch.Tensor, x: torch.Tensor, w: Layer, following: Layer | None, act: str) -> int:
    T, C = x.shape
    return LayerShape(T, C, len(w.fc_1.weight), act, last=following is None).read_bytes(x.itemsize)


def _attention(qkv: torch.Tensor, kv: KVLayer, step: Step, spec: Spec, extras: Extras) -> int:
    most = spec.window or step.extent
    lengths = tuple(min(step.extent - span.num_pad, most) for span in step.spans)
    shape = AttentionShape(lengths, spec.heads, spec.kv_heads, spec.head_dim, decode=True)
    return shape.read_bytes(qkv.itemsize)


def _masked_attention(
    qkv: torch.Tensor, kv: KVLayer, step: Step, spec: Spec, extras: Extras, mask: torch.Tensor
) -> int:
    return _attention(qkv, kv, step, spec._replace(window=None), extras)  # a mask hides what is read all the same


def _next_token(x: torch.Tensor, step: Step, norm_w: Norm, head: Linear, sampling: Sampling) -> int:
    V, C = head.weight.shape
    top_k = sampling.most_words(V) % V  # 0: all of them
    shape = NextTokenShape(len(step.last), len(x), V, C, temperature=sampling.temperature, top_k=top_k)
    return _linear_bytes(head, shape, x.itemsize)


def _embed(ids: torch.Tensor, positions: torch.Tensor, words: torch.Tensor, places: torch.Tensor | None) -> int:
    T, C = len(ids), words.shape[1]
    return 2 * T * C * words.itemsize + ids.nbytes if places is None else EmbedShape(T, C).read_bytes(words.itemsize)


def _advance(state: State, token: torch.Tensor, count: torch.Tensor) -> int:
    return AdvanceShape(len(state.ids)).read_bytes(state.ids.itemsize)


def _more_of_norm_linear(x: torch.Tensor, norm_w: Norm, w: Linear, act: str | None = None) -> int:
    return linear.num_launches(len(x), x, w, act) - 1


def _more_of_residual(x: torch.Tensor, w: Linear, residual: torch.Tensor) -> int:
    return linear.num_launches(len(x), x, w, normed=False) - 1


def _more_of_next_token(x: torch.Tensor, step: Step, norm_w: Norm, head: Linear, sampling: Sampling) -> int:
    return linear.num_launches(len(step.last), x, head, gathered=True) - 1


def _more_of_attention(
    qkv: torch.Tensor, kv: KVLayer, step: Step, spec: Spec, extras: Extras = NO_EXTRAS, **described: Any
) -> int:
    is_rotated = spec.rope or extras.q_norm is not None
    return is_rotated + int(qkv.dtype == torch.float32)  # which writes its cache in a launch of its own


MORE_LAUNCHES: dict[str, Callable[..., int]] = {
    "norm_linear": _more_of_norm_linear,
    "linear_residual": _more_of_residual,
    "masked_attention": _more_of_attention,
    "attention": _more_of_attention,
    "next_token": _more_of_next_token,
}
"""What an op launches beside what its case declares of 16 bits and few rows and channels."""

BYTES: dict[str, Callable[..., int]] = {
    "embed": _embed,
    "norm_linear": _norm_linear,
    "linear_residual": _linear_residual,
    "rest_of_layer": _rest_of_layer,
    "masked_attention": _masked_attention,
    "attention": _attention,
    "next_token": _next_token,
    "advance": _advance,
}
