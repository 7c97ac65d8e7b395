"""Attention of a decoder's tokens to those of a source, in plain PyTorch.

T tokens, S source tokens, B rows, Q queries and K source columns of a row, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from eet_lab.ops.attention import Rows, alike, attend, attend_dropping, attend_masked, known_spans
from eet_lab.ops.noise import Dropout
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
    drop: Dropout | None = None,
) -> Tensor:
    """Each row's queries [T,HD] see all real tokens of its source, [S,G,D] as `source` lays them out -> [T,HD].

    With a mask [B,1,1,K] both are rectangles, every score is computed, and the mask is added. Without, a pad's own
    output is 0, and pads of a source are not read: one call for neighbours of the same lengths.
    """
    q, (keys, values) = q.unflatten(-1, (-1, spec.head_dim)), kv
    places, dropped = torch.arange(len(q), device=q.device), None if drop is None else drop.of_attention()
    if mask is not None:
        B = batch.num_rows
        keys, values = (part.unflatten(0, (B, -1)).transpose(1, 2) for part in kv)
        kept = partial(dropped, tokens=places.view(B, -1), keys=source.positions.view(B, -1)) if dropped else None
        return attend_masked(q, keys, values, mask, spec, empty, kept)
    out = empty("attended", q.shape, q)
    if out is not None and out.is_meta:
        return out.flatten(1)
    spans = known_spans(batch), known_spans(source)
    if out is None:
        out = torch.zeros_like(q)  # what each call gives is written into it, which PyTorch differentiates
    elif sum(count for _, count in spans[0]) < len(q):
        out.zero_()
    for rows, seen in _together(*map(alike, spans)):
        k, v = (seen.of(part).transpose(1, 2) for part in (keys, values))
        if dropped is None:
            mixed = attend(rows.of(q), k, v, None, spec)
        else:
            kept = partial(dropped, tokens=rows.of(places), keys=seen.of(source.positions))
            mixed = attend_dropping(rows.of(q), k, v, None, spec, kept)
        rows.of(out).copy_(mixed.unflatten(0, (rows.num, rows.count)))
    return out.flatten(1)


def cross_mask(source: Batch, like: Tensor, *, empty: Empty) -> Tensor:
    """An additive mask [B,1,1,K] over sources with pads on the left: half the lowest number hides a pad."""
    out = empty("mask", (source.num_rows, 1, 1, source.max_kv), like)
    mask = like.new_zeros(source.num_rows, 1, 1, source.max_kv) if out is None else out.zero_()
    hidden = torch.arange(source.max_kv, device=like.device) < source.keys.begin[:, None]
    return mask.masked_fill_(hidden[:, None, None], torch.finfo(mask.dtype).min / 2)


def _together(queries: list[Rows], keys: list[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """The same rows of both, as many at a time as are alike in both."""
    left = deque(queries), deque(keys)
    while left[0]:
        num = min(each[0].num for each in left)
        yield left[0][0]._replace(num=num), left[1][0]._replace(num=num)
        for each in left:
            rows = each.popleft()
            if rows.num > num:
                each.appendleft(rows._replace(first=rows.first + num * rows.apart, num=rows.num - num))
