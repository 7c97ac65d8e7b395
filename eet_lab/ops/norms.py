"""Norms and softmax in plain PyTorch. T tokens, C channels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from eet_lab.ops.types import Empty, Norm, held


def norm(x: Tensor, w: Norm, *, empty: Empty) -> Tensor:
    """Layer norm, or RMS norm without a bias: [T,C] -> [T,C]."""
    shape = x.shape[-1:]
    normed = rms_norm(x, shape, w.weight, w.eps) if w.bias is None else layer_norm(x, shape, w.weight, w.bias, w.eps)
    return held(normed, empty("normed", x.shape, x))


def softmax(x: Tensor, *, empty: Empty) -> Tensor:
    """Softmax over the last dimension: [T,C] -> [T,C]. Attention has its own, beside its products."""
    return torch.softmax(x, -1, out=empty("softmax", x.shape, x))
