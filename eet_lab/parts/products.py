"""A linear layer whose weight is multiplied by many chunks of tokens in turn: their gradients of it are one sum.

N tokens, C channels, V words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eet_lab.ops import reference
from eet_lab.ops.types import Empty, Linear, autograd

ALIGNED_ROWS = 64
"""What the number of words is rounded up to: products of an odd number take several times as long."""
ADDS_IN_FP32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
"""Whether PyTorch adds a product of 16-bit matrices to one in fp32 on a GPU, in place."""


class Summed:
    """The reference's `linear`, but that gradients of these weights are added to sums, and are then None.

    It multiplies copies of the weights with rows of zeros below, up to a multiple of `ALIGNED_ROWS`. `sums` are in
    `dtype`.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        whole = {id(weight): _Whole.of(weight, dtype) for weight in weights if weight.ndim == 2}
        self.whole = whole
        self.sums = [
            whole[id(weight)].total[: len(weight)] if id(weight) in whole else torch.zeros_like(weight, dtype=dtype)
            for weight in weights
        ]

    def __call__(self, x: Tensor, w: Linear, *, empty: Empty = autograd) -> Tensor:
        whole = self.whole.get(id(w.weight))
        if whole is None or w.scale is not None:
            return reference.linear(x, w, empty=empty)
        return _Summed.apply(x, w.weight, w.bias, whole)


class _Whole(NamedTuple):
    """A weight, and the sum of its gradients, with rows for words that there are not."""

    weight: Tensor
    total: Tensor

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> _Whole:
        (V, C), weight = weight.shape, weight.detach()
        rows = math.ceil(V / ALIGNED_ROWS) * ALIGNED_ROWS
        padded = weight if rows == V else functional.pad(weight, (0, 0, 0, rows - V))
        return cls(padded, weight.new_zeros(rows, C, dtype=dtype))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, whole: _Whole) -> Tensor:
        ctx.save_for_backward(x)
        V, rows = len(weight), len(whole.weight)
        padded = bias if bias is None or rows == V else functional.pad(bias, (0, rows - V))
        # Not saved for backward: the gradient may stand there by then. What is returned is no view, which PyTorch would
        # not let anybody write over.
        ctx.whole, ctx.out = whole, reference.linear(x, Linear(whole.weight, padded), empty=autograd)
        return x.new_empty(0).set_(ctx.out.untyped_storage(), 0, (len(x), V), (rows, 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,), whole, out = ctx.saved_tensors, outer, ctx.whole, ctx.out
        if (grad.data_ptr(), *grad.stride()) == (out.data_ptr(), *out.stride()):
            grad = out  # below the words that there are, logits are 0, and so is what they add
        elif missing := out.shape[1] - grad.shape[1]:
            grad = functional.pad(grad, (0, missing))
        add_product(whole.total, grad.t(), x)
        of_x = grad @ whole.weight if ctx.needs_input_grad[0] else None
        return of_x, None, outer[0].sum(0) if ctx.needs_input_grad[2] else None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in the sum's dtype, which may be wider: on a GPU in one pass over it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and ADDS_IN_FP32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
