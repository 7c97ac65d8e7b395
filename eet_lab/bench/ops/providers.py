"""All providers of ops, ours first. To add one: a `OpProvider` in a tuple.

PyTorch's own functions are here, and our kernels with several rows at a time; attention has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eet_lab.bench.ops.attention import ATTENTION
from eet_lab.bench.ops.provider import Inputs, OpProvider, Prepared
from eet_lab.bench.providers import OURS
from eet_lab.ops import cuda, native, reference
from eet_lab.ops.cases import Case
from eet_lab.ops.cuda.norm import INTERLEAVED
from eet_lab.ops.int8_cases import Int8Shape
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.row_cases import NormShape
from eet_lab.ops.shapes import LinearShape, Shape
from eet_lab.ops.types import Norm, fresh

ACTS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


def linear(shape: LinearShape, inputs: Inputs) -> Prepared:
    """The product and the bias alone."""
    x, w = inputs[0], inputs[1] if shape.residual else inputs[2]
    return Prepared(lambda: F.linear(x, w.weight, w.bias))


def linear_add(shape: LinearShape, inputs: Inputs) -> Prepared:
    """linear(x) + residual, in two calls."""
    x, w, residual = inputs[0], inputs[1], inputs[2].clone()
    return Prepared(lambda: F.linear(x, w.weight, w.bias) + residual)


def norm_linear(shape: LinearShape, inputs: Inputs) -> Prepared:
    """act(linear(norm(x))), a call each."""
    x, norm_w, w, act = inputs[0], inputs[1], inputs[2], ACTS[inputs[3]]
    return Prepared(lambda: act(F.linear(_norm(x, norm_w), w.weight, w.bias)))


def norm(shape: Any, inputs: Inputs) -> Prepared:
    """Layer norm, or RMS norm without a bias."""
    return Prepared(lambda: _norm(inputs[0], inputs[1]))


def embed(shape: Any, inputs: Inputs) -> Prepared:
    """Two look-ups and a sum."""
    ids, positions, token_emb, position_emb = inputs
    return Prepared(lambda: F.embedding(ids, token_emb) + F.embedding(positions, position_emb))


def choose(shape: Any, inputs: Inputs) -> Prepared:
    """Arg-max, or a draw with PyTorch's topk, sort and cumsum: the reference itself."""
    logits, *_, positions, sampling = inputs
    return Prepared(lambda: reference.choose(logits, positions, sampling))


def next_token(shape: NextTokenShape, inputs: Inputs) -> Prepared:
    """Norm, product and choice, as the reference has them."""
    return Prepared(lambda: reference.next_token(*inputs, empty=fresh))


def _norm(x: Tensor, w: Norm) -> Tensor:
    width = x.shape[-1:]
    return F.rms_norm(x, width, w.weight, w.eps) if w.bias is None else F.layer_norm(x, width, w.weight, w.bias, w.eps)


def _int8(shape: Shape) -> str | None:
    has_int8 = isinstance(shape, Int8Shape) or (isinstance(shape, NextTokenShape) and shape.int8)
    return "PyTorch's linear takes no int8 weights" if has_int8 else None


PLAIN = (
    OpProvider(
        "torch-linear",
        ("norm_linear", "linear_residual"),
        linear,
        less="the product alone: nothing around it",
        unfit=_int8,
    ),
    OpProvider("torch-linear-add", ("linear_residual",), linear_add, unfit=_int8),
    OpProvider("torch-norm-linear", ("norm_linear",), norm_linear, unfit=_int8),
    OpProvider("torch-norm", ("norm",), norm),
    OpProvider("torch-embed", ("embed",), embed),
    OpProvider("torch-next-token", ("next_token",), next_token, less="it is the reference", unfit=_int8),
    OpProvider("torch-choose", ("choose", "choose_top_k"), choose, less="it is the reference"),
)


def softmax(shape: Any, inputs: Inputs) -> Prepared:
    """PyTorch's softmax over the last dimension."""
    return Prepared(lambda: torch.softmax(inputs[0], -1))


def interleaved(rows: int, shape: Any, inputs: Inputs) -> Prepared:
    """Our kernel with so many rows at a time."""
    op: Any = cuda.norm if isinstance(shape, NormShape) else cuda.softmax
    native.prepare(op.kernels)
    return Prepared(lambda: op(*inputs, empty=fresh, rows=rows))


ROWS = (
    OpProvider("torch-softmax", ("softmax",), softmax),
    *(
        OpProvider(f"eet_lab-{rows}-rows", ("norm", "softmax"), partial(interleaved, rows), native.available)
        for rows in INTERLEAVED[1:]
    ),
)


PROVIDERS: dict[str, OpProvider] = {provider.name: provider for provider in (*PLAIN, *ROWS, *ATTENTION)}


def names_for(case: Case) -> tuple[str, ...]:
    """Ours, and everyone who does that case's op."""
    return (OURS, *(name for name, provider in PROVIDERS.items() if case.op in provider.ops))
