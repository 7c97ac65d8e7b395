"""Weight-only int8: a matrix as whole numbers from -127 to 127, and the scales that make them weights again.

N outputs, C inputs; a group is a run of an output's inputs with one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = 127
"""The largest quantized value. -128 is not used, so that a weight and its negative are rounded alike."""

ROWS = 4096
"""Outputs that are quantized at a time: what that takes in fp32 stays far below the matrix itself."""


def quantized(weight: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """The weight [N,C] as int8 [N,C] and its scales [N,groups], fp32 whatever the weight's dtype.

    A scale is the largest magnitude of its group over 127, so that no weight is off by more than half a scale.
    `group` is the number of inputs that share one: a power of two (the last group may be shorter), or 0 for all.
    """
    parts = [_quantized(rows, group) for rows in weight.split(ROWS)]
    whole, scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return whole, scale


def dequantized(whole: Tensor, scale: Tensor, *, out: Tensor) -> Tensor:
    """`whole * scale` written to `out` [N,C], rounded once to its dtype."""
    group = group_size(whole.shape[1], scale.shape[1])
    num_full = whole.shape[1] // group
    full = slice(0, num_full * group)
    torch.mul(
        whole[:, full].unflatten(1, (num_full, group)),
        scale[:, :num_full, None],
        out=out[:, full].unflatten(1, (num_full, group)),
    )
    if num_full < scale.shape[1]:
        torch.mul(whole[:, full.stop :], scale[:, -1:], out=out[:, full.stop :])
    return out


def group_size(num_inputs: int, num_groups: int) -> int:
    """How many inputs share a scale: all of them, or the power of two that makes so many groups."""
    return num_inputs if num_groups == 1 else 1 << (-(-num_inputs // num_groups) - 1).bit_length()


def _quantized(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    (N, C), group = weight.shape, group or weight.shape[1]
    grouped = pad(weight.float(), (0, -C % group)).view(N, -1, group)
    scale = grouped.abs().amax(-1) / LARGEST
    whole = (grouped / torch.where(scale > 0, scale, 1)[:, :, None]).round_().clamp_(-LARGEST, LARGEST)
    return whole.view(N, -1)[:, :C].to(torch.int8, memory_format=torch.contiguous_format), scale
