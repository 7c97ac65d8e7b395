"""A linear layer whose weight is multiplied by many chunks of tokens in turn: their gradients of it are one sum.

N tokens, C channels, V words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eet_lab.ops import reference
from eet_lab.ops.types import Empty, Linear, autograd

ALIGNED = 128
"""Bytes at a multiple of which each row of logits begins. V may be odd, and products of such rows take longer."""
ADDS_IN_FP32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
"""Whether PyTorch adds a product of 16-bit matrices to one in fp32 on a GPU, in place."""


class Summed:
    """The reference's `linear`, but that gradients of these weights are added to sums, and are then None."""

    def __init__(self, weights: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        self.sums = {id(weight): total for weight, total in zip(weights, sums, strict=True)}

    def __call__(self, x: Tensor, w: Linear, *, empty: Empty = autograd) -> Tensor:
        total = self.sums.get(id(w.weight))
        if total is None or w.scale is not None:
            return reference.linear(x, w, empty=empty)
        return _Summed.apply(x, w.weight, w.bias, total)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        aligned = ALIGNED // x.element_size()
        stride = math.ceil(len(weight) / aligned) * aligned
        out = x.new_empty_strided((len(x), len(weight)), (stride, 1))
        return reference.linear(x, Linear(weight, bias), empty=lambda *_: out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        add_product(ctx.total, outer[0].t(), x)
        of_x = outer[0] @ weight if ctx.needs_input_grad[0] else None
        return of_x, None, outer[0].sum(0) if ctx.needs_input_grad[2] else None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in the sum's dtype, which may be wider: on a GPU in one pass over it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and ADDS_IN_FP32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
