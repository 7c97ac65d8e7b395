"""Launches of the kernels for training, small ones of every kind, for record.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.ops import reference
from eet_lab.ops.cuda import (
    train_attention,
    train_embedding,
    train_epilogue,
    train_loss,
    train_norm,
    train_optimizer,
)
from eet_lab.ops.noise import Dropout, Noise
from eet_lab.ops.types import Norm, autograd

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WORDS = (5, 23, 4099)  # fewer than a vector, and odd: rows begin anywhere


class TrainCall(NamedTuple):
    """A call, with the tensors that its kernels read."""

    name: str
    inputs: tuple[Any, ...]
    call: Callable[[], Any]


def train_calls() -> Iterator[TrainCall]:
    """All of them."""
    for dtype in DTYPES:
        yield from (_loss(words, dtype) for words in WORDS)
        yield from (_update(dtype, kind) for kind in ("adamw", "sgd", "sgd with momentum"))
        yield from (
            _norm(*shape, dtype, biased, goes_on)
            for shape in ((3, 64), (37, 520), (2, 8192))
            for biased in (True, False)
            for goes_on in (True, False)
        )
        yield from (_epilogue(37, F, act, dtype) for F in (8, 520) for act in (None, "gelu", "swiglu"))
        yield from (_embedded(T, 520, dtype) for T in (5, 200))
        if dtype != torch.float32:
            for lengths in ((50, 1, 0, 64, 17), (64, 33), (128, 3, 97), (65, 0, 128, 21)):
                yield _attention(lengths, dtype)


def _loss(words: int, dtype: torch.dtype) -> TrainCall:
    logits, labels = torch.randn(5, words).to(dtype), torch.tensor([0, words - 1, -100, 2, 3])
    outer = torch.ones(())

    def call() -> Tensor:
        _, kept = train_loss.cross_entropy_loss(logits, labels, 0.1)
        train_loss.cross_entropy_grad(logits, labels, kept, 0.1, outer)
        return train_loss.cross_entropy_with_grad(logits, labels, 0.1)

    return TrainCall(f"cross_entropy/v{words} {dtype}", (logits, labels, outer), call)


def _update(dtype: torch.dtype, kind: str, n: int = 4099) -> TrainCall:
    """Of a count that is no multiple of four, with a master copy where there are 16 bits."""
    weights, grads = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    moments = [torch.rand(n) for _ in range(2)]
    master = None if dtype == torch.float32 else weights.float()
    numbers = (torch.tensor(0.01), torch.tensor(1.0), torch.tensor(3.0), torch.tensor(False))
    noise = 7 if dtype == torch.bfloat16 else None

    def call() -> Tensor:
        if kind == "adamw":
            rule: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
            train_optimizer.adamw(weights, grads, moments, master, numbers, noise=noise, **rule)
        else:
            held = moments[:1] if "momentum" in kind else []
            rule = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
            train_optimizer.sgd(weights, grads, held, master, numbers, noise=noise, **rule)
        return train_optimizer.norm_of([grads, weights])

    return TrainCall(f"{kind}/n{n} {dtype}", (weights, grads, moments, master, numbers), call)


def _differentiated(op: Callable[..., Any], *inputs: Tensor) -> Callable[[], Any]:
    """Forward and backward."""
    leaves = [each.requires_grad_() for each in inputs]

    def call() -> Any:
        made = op(*leaves)
        outs = made if isinstance(made, tuple) else (made,)
        return torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])

    return call


def _norm(T: int, C: int, dtype: torch.dtype, biased: bool, goes_on: bool) -> TrainCall:
    """Alone, and where x goes on to a residual."""
    norm: Any = train_norm.norm_passing_on if goes_on else train_norm.norm
    inputs = [torch.randn(*shape).to(dtype) for shape in ((T, C), (C,), (C,))[: 3 if biased else 2]]

    def op(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return norm(x, Norm(weight, bias, 1e-5), empty=autograd)

    return TrainCall(f"norm/t{T}/c{C}{'/on' * goes_on} {dtype}", tuple(inputs), _differentiated(op, *inputs))


def _epilogue(T: int, F: int, act: str | None, dtype: torch.dtype) -> TrainCall:
    """Without an activation: dropout and residual."""
    N = 2 * F if act in reference.GATED else F
    inputs, keys = [torch.randn(*shape).to(dtype) for shape in ((T, N), (N,))], torch.arange(T)

    def op(y: Tensor, bias: Tensor) -> Tensor:
        residual, noise = (None, None) if act else (y.detach(), Noise(keys, 3, 0.1))
        return train_epilogue.Epilogue.apply(y, bias, residual, act, noise)

    return TrainCall(f"epilogue/t{T}/f{F}/{act} {dtype}", (*inputs, keys), _differentiated(op, *inputs))


def _embedded(T: int, C: int, dtype: torch.dtype) -> TrainCall:
    """Rows that few, many and all tokens read."""
    ids, positions, keys = torch.arange(T) // 90 * 3, torch.arange(T) % 7, torch.arange(T)
    inputs, drop = [torch.randn(rows, C).to(dtype) for rows in (9, 7, 2)], Dropout(0.1, 0.0, keys, positions)
    op = partial(train_embedding.embedded, ids, positions, None, scale=2.0, padding=3, empty=autograd, drop=drop)
    return TrainCall(f"embedded/t{T}/c{C} {dtype}", (*inputs, ids, positions, keys), _differentiated(op, *inputs))


def _attention(lengths: tuple[int, ...], dtype: torch.dtype, heads: int = 2) -> TrainCall:
    """Of rows that fill their kernel, do not, and have no token; causal where they are few, else with dropout."""
    qkv = torch.randn(sum(lengths), 3 * heads * train_attention.HEAD_DIM).to(dtype)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    keys, is_causal = torch.arange(len(qkv)), len(lengths) < 4
    how = heads, max(lengths), 0.125, is_causal, None if is_causal else Noise(keys, 3, 0.1)

    def op(x: Tensor) -> Tensor:
        return train_attention.ShortAttention.apply(x, ends, *how)

    return TrainCall(f"attention/{lengths} {dtype}", (qkv, ends, keys), _differentiated(op, qkv))
