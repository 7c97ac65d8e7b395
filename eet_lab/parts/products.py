"""A linear layer whose weight is multiplied by many chunks of tokens in turn: their gradients of it are one sum.

N tokens, C channels, V words.
"""

from __future__ import annotations

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

    Outputs have columns of zeros behind them, and sums rows, up to a multiple of `ALIGNED_ROWS`. `sums` are in `dtype`.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.aligned = {id(weight): _Aligned.of(weight, dtype) for weight in weights if weight.ndim == 2}
        self.sums = [
            self.aligned[id(weight)].total[: len(weight)]
            if id(weight) in self.aligned
            else torch.zeros_like(weight, dtype=dtype)
            for weight in weights
        ]

    def __call__(self, x: Tensor, w: Linear, *, empty: Empty = autograd) -> Tensor:
        aligned = self.aligned.get(id(w.weight))
        if aligned is None or w.scale is not None:
            return reference.linear(x, w, empty=empty)
        return _Summed.apply(x, w.weight, w.bias, aligned)


class _Aligned(NamedTuple):
    """A weight in two parts, and the sum of its gradients, with rows for words that there are not."""

    weight: Tensor
    """All words but the last ones: a multiple of `ALIGNED_ROWS`. It is no copy."""
    rest: Tensor
    """The last words and rows of zeros, `ALIGNED_ROWS` in all; without rows where none are left."""
    total: Tensor

    @classmethod
    def of(cls, weight: Tensor, dtype: torch.dtype) -> _Aligned:
        """Both parts."""
        (V, C), weight = weight.shape, weight.detach()
        num_rest = V % ALIGNED_ROWS
        rest = functional.pad(weight[V - num_rest :], (0, 0, 0, -num_rest % ALIGNED_ROWS))
        return cls(weight[: V - num_rest], rest, weight.new_zeros(V - num_rest + len(rest), C, dtype=dtype))

    def logits(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N,C] -> [N,V and columns of zeros]."""
        out = x.new_empty(len(x), len(self.total))
        begin, num_rest = len(self.weight), len(self.rest)
        for part, columns in zip((self.weight, self.rest), out.split((begin, num_rest), 1), strict=True):
            if not len(part):
                continue
            if bias is None:
                torch.mm(x, part.t(), out=columns)
            else:
                some = bias[:begin] if part is self.weight else bias[begin:]
                torch.addmm(functional.pad(some, (0, len(part) - len(some))), x, part.t(), out=columns)
        return out

    def gradient(self, grad: Tensor) -> Tensor:
        """That of the states: [N,V and columns of zeros] -> [N,C]. The small part is rounded first."""
        of_weight, of_rest = grad.split((len(self.weight), len(self.rest)), 1)
        if not len(self.rest):
            return of_weight @ self.weight
        return torch.addmm(of_rest @ self.rest, of_weight, self.weight)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, aligned: _Aligned) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved for backward: the gradient may stand there by then. What is returned is no view, which PyTorch would
        # not let anybody write over.
        ctx.aligned, ctx.out = aligned, aligned.logits(x, bias)
        return x.new_empty(0).set_(ctx.out.untyped_storage(), 0, (len(x), len(weight)), (ctx.out.shape[1], 1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,), aligned, out = ctx.saved_tensors, outer, ctx.aligned, ctx.out
        if (grad.data_ptr(), *grad.stride()) == (out.data_ptr(), *out.stride()):
            grad = out  # behind the words that there are, logits are 0, and so is what they add
        elif missing := out.shape[1] - grad.shape[1]:
            grad = functional.pad(grad, (0, missing))
        add_product(aligned.total, grad.t(), x)
        of_x = aligned.gradient(grad) if ctx.needs_input_grad[0] else None
        return of_x, None, outer[0].sum(0) if ctx.needs_input_grad[2] else None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in the sum's dtype, which may be wider: on a GPU in one pass over it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and ADDS_IN_FP32:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
