"""Layer norm and RMS norm that are trained. T tokens, C channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, at, gpu, needs, stream_of, untrainable
from eet_lab.ops.cuda.norm import norm as normed
from eet_lab.ops.cuda.plan import ceil
from eet_lab.ops.fits import Shapes, refuses
from eet_lab.ops.types import Empty, Norm, fresh

MOST_CHANNELS = 8192  # of a row that a team of 16 warps holds
WARP_CHANNELS = 512  # of a row that a warp holds
BLOCK_WARPS = 8


def _unfit(model: Shapes) -> str | None:
    C = model.hidden_size
    if C % 8 or C > MOST_CHANNELS:
        return f"the norms' kernels take a multiple of 8 channels, at most {MOST_CHANNELS:,}, and the model has {C:,}"
    return None


def norm_passing_on(x: Tensor, w: Norm, *, empty: Empty) -> tuple[Tensor, Tensor]:
    """`norm`, and x as it goes on: the backward pass adds the gradients of both in one launch."""
    return _Norm.apply(x, w.weight, w.bias, w.eps)


@refuses(_unfit, untrainable)
@needs("norm", "train_norm")
def norm(x: Tensor, w: Norm, *, empty: Empty) -> Tensor:
    """Layer norm, or RMS norm without a bias: [T,C] -> [T,C]. Kept are x, and 8 bytes a row: its mean, and 1 / standard
    deviation.
    """
    return norm_passing_on(x, w, empty=empty)[0]


norm.passes_on = norm_passing_on  # type: ignore[attr-defined]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
        mean = None if bias is None else torch.empty_like(scale)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.set_materialize_grads(False)  # where x does not go on, nothing is added
        return normed(x, Norm(weight, bias, eps), empty=fresh, mean=mean, scale=scale), x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dresidual = (None if grad is None else grad.contiguous() for grad in grads)
        if dy is None:
            return dresidual, None, None, None
        x, weight, mean, scale = ctx.saved_tensors
        return *norm_backward(dy, x, weight, mean, scale, dresidual), None


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, scale: Tensor, dresidual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x [T,C], of the weight [C] and, where there is a mean, of the bias [C]. Two launches.

    `dresidual` [T,C] is that of x as it goes on past the norm, and is added to that of x.
    """
    T, C = x.shape
    log_team = (ceil(C, WARP_CHANNELS) - 1).bit_length()
    teams = max(1, BLOCK_WARPS >> log_team)
    each = 1 if 1 << log_team > BLOCK_WARPS else 3 if x.element_size() == 2 else 2  # blocks of a multiprocessor
    rows = max(1, ceil(T, teams * each * gpu().num_blocks))  # of a team
    num_blocks = max(1, ceil(T, teams * rows))  # as few as take no longer
    partial = torch.empty(2, num_blocks, C, dtype=torch.float32, device=x.device)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    dbias = None if mean is None else torch.empty_like(weight)
    native.loaded("train_norm").eet_norm_backward(
        dx=at(dx), dweight=at(dweight), dbias=at(dbias), partial=at(partial), dy=at(dy), x=at(x),
        dresidual=at(dresidual), norm_weight=at(weight), mean=at(mean), scale=at(scale), dtype=DTYPES[x.dtype], T=T,
        C=C, log_team=log_team, num_blocks=num_blocks, stream=stream_of(x),
    )  # fmt: skip
    return dx, dweight, dbias
