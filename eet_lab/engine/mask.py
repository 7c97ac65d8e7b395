"""How attention knows what a query may see. A mask part returns `attend(qkv, kv, step)` for one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eet_lab.ops.types import Empty, Step


def dense_mask(ops: Any, step: Step, like: Tensor, *, empty: Empty) -> Callable:
    """The baseline: an additive [B,1,Q,K], 0 where a query may look and the lowest number elsewhere, every step."""
    B, K = len(step.num_pad), step.extent
    mask = empty("mask", (B, 1, len(step.ids) // B, K), like).zero_()
    key = torch.arange(K, device=like.device)
    hidden = (key < step.num_pad[step.rows, None]) | (key > step.columns[:, None])
    mask.masked_fill_(hidden.view(mask.shape), torch.finfo(mask.dtype).min)
    return partial(ops.masked_attention, mask=mask)


def no_mask(ops: Any, step: Step, like: Tensor, *, empty: Empty) -> Callable:
    """`num_pad` and the query's own column bound the keys; nothing is built, and pads are never read."""
    return ops.attention
