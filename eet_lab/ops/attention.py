"""Attention in plain PyTorch: heads, the KV cache, and what a query may see.

Without a cache (None) the tokens of a pass see each other, as `rows` says. T tokens, B rows, Q queries a row, K columns
of the KV cache or of the pass, H heads, G KV heads, D head dim, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops.noise import Dropout, all_kept
from eet_lab.ops.norms import norm
from eet_lab.ops.rows import attend, attend_rows, biased, relative_bias
from eet_lab.ops.types import KV, NO_EXTRAS, Batch, Empty, Extras, Spec, fresh, held


def heads(
    qkv: Tensor, batch: Batch, spec: Spec, extras: Extras = NO_EXTRAS, *, empty: Empty = fresh
) -> tuple[Tensor, Tensor, Tensor]:
    """[T,(H+2G)D] -> queries [T,H,D], keys and values [T,G,D], with the norms of heads and their rotation."""
    q, k, v = qkv.unflatten(-1, (-1, spec.head_dim)).split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
    if extras.q_norm is not None and extras.k_norm is not None:
        q, k = norm(q, extras.q_norm, empty=empty), norm(k, extras.k_norm, empty=empty)
    if spec.rope and extras.inv_freq is not None:
        angles = batch.positions[:, None, None] * extras.inv_freq
        cos, sin = (
            held((turn(angles) * spec.rope_factor).to(q.dtype), empty(name, angles.shape, q))
            for name, turn in (("cos", torch.cos), ("sin", torch.sin))
        )
        q, k = rotated(q, cos, sin, empty=empty), rotated(k, cos, sin, empty=empty)
    return q, k, v


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, empty: Empty) -> Tensor:
    """Heads [T,H,D] turned by angles [T,1,D/2]: number i of a head's first half against number i of its second."""
    (first, second), out = x.chunk(2, -1), empty("rotated", x.shape, x)
    if out is None:
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    to_first, to_second = out.chunk(2, -1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return out


def append(
    qkv: Tensor, kv: KV | None, batch: Batch, spec: Spec, extras: Extras = NO_EXTRAS, *, empty: Empty = fresh
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the new keys and values into the cache: [T,(H+2G)D] -> queries [T,H,D], all keys and values [B,G,K,D].

    Those of a cache in pages are copied together, since PyTorch's products take rectangles. Without a cache they are
    those of a pass that is a rectangle.
    """
    q, k, v = heads(qkv, batch, spec, extras, empty=empty)
    if kv is None:
        keys, values = (part.unflatten(0, (batch.num_rows, -1)).transpose(1, 2) for part in (k, v))
        return q, keys, values
    (keys, values), table = kv, batch.keys.table
    new = batch.rows, batch.columns, k, v
    rows, columns, k, v = new if batch.num_read == len(k) else (part[: batch.num_read] for part in new)
    if table is None:
        keys[rows, :, columns] = k
        values[rows, :, columns] = v
        return q, keys, values
    page = keys.shape[2]
    pages, columns = table[rows, columns // page], columns % page
    keys[pages, :, columns] = k
    values[pages, :, columns] = v
    blocks = table[:, : -(-batch.max_kv // page)]
    keys, values = (gathered(part, blocks, name, empty) for part, name in ((keys, "keys"), (values, "values")))
    return q, keys[:, :, : batch.max_kv], values[:, :, : batch.max_kv]


def gathered(pages: Tensor, blocks: Tensor, name: str, empty: Empty) -> Tensor:
    """Pages [P,G,page,D] in the order of a block table [B,blocks] -> [B,G,blocks*page,D]."""
    (B, num_blocks), (_, G, page, D) = blocks.shape, pages.shape
    head = torch.arange(G, device=blocks.device)
    chosen = (blocks[:, None] * G + head[:, None]).flatten()
    out = empty(name, (len(chosen), page, D), pages)
    return torch.index_select(pages.flatten(0, 1), 0, chosen, out=out).view(B, G, num_blocks * page, D)


def dense_mask(batch: Batch, spec: Spec, like: Tensor, bias: Tensor | None = None, *, empty: Empty) -> Tensor:
    """An additive mask [B,1,Q,K]: 0 where a query may look, and half the lowest number elsewhere.

    Half of it, so that no sum with a score overflows: the row of a pad is hidden altogether, and would become NaN. With
    a `bias` of relative positions [buckets,H] it holds that of each head where a query may look: [B,H,Q,K].
    """
    B, K = batch.num_rows, batch.max_kv
    shape = B, 1, len(batch.ids) // B, K
    out = empty("mask", shape, like)
    mask = like.new_zeros(shape) if out is None else out.zero_()
    key = torch.arange(K, device=like.device)
    hidden = key < batch.keys.begin[batch.rows, None]
    if spec.causal:
        hidden = hidden | (key > batch.columns[:, None])
    if spec.window is not None:
        hidden = hidden | (key <= batch.columns[:, None] - spec.window)
    mask = mask.masked_fill_(hidden.view(mask.shape), torch.finfo(mask.dtype).min / 2)
    if bias is None:
        return mask
    of_heads = relative_bias(bias, spec, batch.columns.view(B, -1), key)
    return torch.add(of_heads, mask, out=empty("biased_mask", of_heads.shape, like))


def masked_attention(
    qkv: Tensor,
    kv: KV | None,
    batch: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    mask: Tensor,
    empty: Empty,
    drop: Dropout = all_kept,
) -> Tensor:
    """Attention as EET's baseline had it: every score is computed, then a mask is added, [B,1,Q,K] or one of each head.

    [T,(H+2G)D] -> [T,HD].
    """
    q, keys, values = append(qkv, kv, batch, spec, extras, empty=empty)
    kept, dropped = None, drop.of_attention()
    if dropped is not None:
        kept = partial(dropped, tokens=torch.arange(len(q), device=q.device).view(len(keys), -1))
    return attend_masked(q, keys, values, mask, spec, empty, kept)


def attend_masked(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    spec: Spec,
    empty: Empty,
    dropped: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Queries [T,H,D] of rows of the same length, keys and values [B,G,K,D] -> [T,HD], each score with a mask."""
    (B, G, K, D), (T, H, _) = keys.shape, q.shape
    if H > G:
        keys, values = keys.repeat_interleave(H // G, 1), values.repeat_interleave(H // G, 1)
    out_like = q
    q = q.unflatten(0, (B, -1)).transpose(1, 2).mul(D**-0.5 if spec.scale is None else spec.scale)
    scores = torch.matmul(q, keys.transpose(-1, -2), out=empty("scores", (B, H, T // B, K), q))
    scores = torch.add(scores, mask, out=empty("masked_scores", scores.shape, q))
    weights = torch.softmax(scores, -1, out=empty("attention_weights", scores.shape, q))
    if dropped is not None:
        weights = dropped(weights)
    mixed = torch.matmul(weights, values, out=empty("mixed", q.shape, q)).transpose(1, 2)
    out = empty("attended", (T, H * D), out_like)
    return mixed.reshape(T, H * D) if out is None else out.view(mixed.shape).copy_(mixed).view(T, H * D)


def attend_heads(
    qkv: Tensor,
    batch: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    empty: Empty,
    drop: Dropout = all_kept,
    attend_rows: Callable = attend_rows,
) -> Tensor:
    """Attention of a pass's tokens to each other: [T,(H+2G)D] -> [T,HD]. `attend_rows` gets the three parts."""
    q, k, v = heads(qkv, batch, spec, extras, empty=empty)
    return attend_rows(q, k, v, batch, batch, spec, extras, empty=empty, drop=drop)


def attention(
    qkv: Tensor,
    kv: KV | None,
    batch: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    empty: Empty,
    drop: Dropout = all_kept,
    attend_rows: Callable = attend_rows,
    attend_heads: Callable = attend_heads,
) -> Tensor:
    """Attention without a mask: a query sees columns begin .. its own, or the last of them. [T,(H+2G)D] -> [T,HD];
    a pad's own is 0. Without a cache `attend_heads` does it, by `attend_rows`.

    Plain PyTorch has no call for rows that see different columns, so these get a call each. In a step that is captured
    the host knows no row's columns: keys are gathered by what the device knows.
    """
    if kv is None:
        return attend_heads(qkv, batch, spec, extras, empty=empty, drop=drop, attend_rows=attend_rows)
    q, keys, values = append(qkv, kv, batch, spec, extras, empty=empty)
    if batch.spans is None or batch.keys.spans is None:
        return _attention_of_captured(q, keys, values, batch, spec, extras, empty)
    out, (T, H, D) = empty("attended", q.shape, q), q.shape
    if out.is_meta:  # a meta trace only records what was asked for
        return out.flatten(1)
    if sum(count for _, count in batch.spans) < T:
        out.zero_()
    for rows, (first, count), (begin, end) in _seeing_the_same(batch.spans, batch.keys.spans, T):
        now = slice(first, first + count * (rows.stop - rows.start))
        if spec.window is not None:
            begin = max(begin, end - count + 1 - spec.window)  # what the first of the queries sees
        bound = _bound(batch.columns, now, count, begin, end, spec)
        if extras.bias is not None:
            newest = torch.arange(end - count, end, device=q.device)  # the queries of these rows
            bound = biased(bound, extras.bias, spec, newest, torch.arange(begin, end, device=q.device))
        k, v = (part[rows, :, begin:end] for part in (keys, values))
        out[now] = attend(q[now].view(-1, count, H, D), k, v, bound, spec)
    return out.flatten(1)


def within_window(batch: Batch, window: int, empty: Empty) -> Batch:
    """The batch, one token a row, where `keys.begin` is no earlier than the first column that a window shows."""
    if batch.keys.window == window:
        return batch
    begin = torch.sub(batch.columns, window - 1, out=empty("window_begin", batch.columns.shape, batch.keys.begin))
    torch.maximum(begin, batch.keys.begin, out=begin)
    return batch._replace(keys=batch.keys._replace(begin=begin, window=window))


def _seeing_the_same(
    spans: Sequence[tuple[int, int]], seen: Sequence[tuple[int, int]], num_tokens: int
) -> Iterator[tuple[slice, tuple[int, int], tuple[int, int]]]:
    """Rows that one call serves: all, if they read as many tokens, end to end, and see the same columns; else each.

    With the first token and the number of tokens of a row, and the columns that its last one sees. A row that reads
    nothing is left out.
    """
    B, count = len(spans), spans[0][1]
    in_order = all(span == (row * count, count) for row, span in enumerate(spans))
    if B * count == num_tokens and in_order and len(set(seen)) == 1:
        yield slice(0, B), spans[0], seen[0]
        return
    for row, (span, columns) in enumerate(zip(spans, seen, strict=True)):
        if span[1]:
            yield slice(row, row + 1), span, columns


def _bound(columns: Tensor, now: slice, count: int, begin: int, end: int, spec: Spec) -> Tensor | None:
    """Which of the columns begin .. end - 1 each query sees [R,1,Q,K]; None: all up to its own, the newest ones.

    The queries' own are columns[now], `count` a row.
    """
    if spec.window is None or end - begin <= spec.window:
        return None
    query = columns[now].view(-1, 1, count, 1)
    column = torch.arange(begin, end, device=query.device)
    newest = query if spec.causal else query[:, :, -1:]
    return (column <= newest) & (column > query - spec.window)


def _attention_of_captured(
    q: Tensor, keys: Tensor, values: Tensor, batch: Batch, spec: Spec, extras: Extras, empty: Empty
) -> Tensor:
    """One token a row, by device numbers alone: q [B,H,D], keys and values [B,G,K,D] -> [B,HD].

    Where rows have pads, each row's keys are first moved to its front, so that no pad is read.
    """
    if not batch.one_each:
        raise KernelError("A captured step reads one token a row. Call a pass over more of them without a capture.")
    if extras.bias is not None:
        raise KernelError("A captured step knows no bias of relative positions. Run this model without a capture.")
    K, own = keys.shape[2], batch.columns[:, None]
    column = torch.arange(K, device=q.device)
    if batch.keys.padded:
        column = batch.keys.begin[:, None] + column
        there = torch.minimum(column, own)[:, None, :, None].expand(keys.shape)
        keys, values = (
            torch.gather(part, 2, there, out=empty(name, part.shape, part))
            for part, name in ((keys, "own_keys"), (values, "own_values"))
        )
    out, bound = empty("attended", q.shape, q), column <= own
    if out.is_meta:
        return out.flatten(1)
    if spec.window is not None:
        bound = bound & (column > own - spec.window)
    mixed = attend(q[:, None], keys, values, bound[:, None, None], spec)
    return out.copy_(mixed).flatten(1)
