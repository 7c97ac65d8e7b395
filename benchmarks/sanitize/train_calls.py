"""Launches of the kernels for training, small ones of every kind, for record.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.ops.cuda import train_loss, train_optimizer

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
            train_optimizer.sgd(weights, grads, held, master, numbers, noise=noise, clears=True, **rule)
        return train_optimizer.norm_of([grads, weights])

    return TrainCall(f"{kind}/n{n} {dtype}", (weights, grads, moments, master, numbers), call)
