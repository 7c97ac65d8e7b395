"""Attention of a decoder's tokens to those of a source, in plain PyTorch.

T tokens, S source tokens, B rows, Q queries and K source columns of a row, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from eet_lab.ops.attention import attend_masked
from eet_lab.ops.noise import Dropout, all_kept
from eet_lab.ops.rows import attend_rows
from eet_lab.ops.types import KV, Batch, Empty, Spec


def cross_attention(
    q: Tensor,
    kv: KV,
    batch: Batch,
    source: Batch,
    spec: Spec,
    *,
    mask: Tensor | None = None,
    empty: Empty,
    drop: Dropout = all_kept,
    attend_rows: Callable = attend_rows,
) -> Tensor:
    """Each row's queries [T,HD] see all real tokens of its source, [S,G,D] as `source` lays them out -> [T,HD].

    With a mask [B,1,1,K] both are rectangles, every score is computed, and the mask is added. Without, a pad's own
    output is 0, and pads of a source are not read: `attend_rows` does it.
    """
    q, (keys, values) = q.unflatten(-1, (-1, spec.head_dim)), kv
    if mask is not None:
        B, dropped = batch.num_rows, drop.of_attention()
        places = torch.arange(len(q), device=q.device)
        keys, values = (part.unflatten(0, (B, -1)).transpose(1, 2) for part in kv)
        kept = partial(dropped, tokens=places.view(B, -1), keys=source.positions.view(B, -1)) if dropped else None
        return attend_masked(q, keys, values, mask, spec, empty, kept)
    return attend_rows(q, keys, values, batch, source, spec, empty=empty, drop=drop)


def cross_mask(source: Batch, like: Tensor, *, empty: Empty) -> Tensor:
    """An additive mask [B,1,1,K] over sources with pads on the left: half the lowest number hides a pad."""
    out = empty("mask", (source.num_rows, 1, 1, source.max_kv), like)
    mask = like.new_zeros(source.num_rows, 1, 1, source.max_kv) if out is None else out.zero_()
    hidden = torch.arange(source.max_kv, device=like.device) < source.keys.begin[:, None]
    return mask.masked_fill_(hidden[:, None, None], torch.finfo(mask.dtype).min / 2)
