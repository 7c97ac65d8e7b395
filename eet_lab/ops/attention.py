"""Attention in plain PyTorch: heads, the KV cache, and what a query may see.

Without a cache (None) the tokens of a pass see each other. T tokens, B rows, R of them at a time, Q queries a row, K
columns of the KV cache or of the pass, H heads, G KV heads, D head dim, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eet_lab.ops.norms import norm
from eet_lab.ops.pads import serves_any_pads
from eet_lab.ops.types import NO_EXTRAS, Empty, Extras, KVLayer, Span, Spec, Step, fresh


def heads(
    qkv: Tensor, step: Step, spec: Spec, extras: Extras = NO_EXTRAS, *, empty: Empty = fresh
) -> tuple[Tensor, Tensor, Tensor]:
    """[T,(H+2G)D] -> queries [T,H,D], keys and values [T,G,D], with the norms of heads and their rotation."""
    q, k, v = qkv.unflatten(-1, (-1, spec.head_dim)).split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
    if extras.q_norm is not None and extras.k_norm is not None:
        q, k = norm(q, extras.q_norm, empty=empty), norm(k, extras.k_norm, empty=empty)
    if spec.rope and extras.inv_freq is not None:
        angles = step.positions[:, None, None] * extras.inv_freq
        cos, sin = (
            empty(name, angles.shape, q).copy_(turn(angles) * spec.rope_factor)
            for name, turn in (("cos", torch.cos), ("sin", torch.sin))
        )
        q, k = rotated(q, cos, sin, empty=empty), rotated(k, cos, sin, empty=empty)
    return q, k, v


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, empty: Empty) -> Tensor:
    """Heads [T,H,D] turned by angles [T,1,D/2]: number i of a head's first half against number i of its second."""
    (first, second), out = x.chunk(2, -1), empty("rotated", x.shape, x)
    to_first, to_second = out.chunk(2, -1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return out


def append(
    qkv: Tensor, kv: KVLayer | None, step: Step, spec: Spec, extras: Extras = NO_EXTRAS, *, empty: Empty = fresh
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the new keys and values into the cache: [T,(H+2G)D] -> queries [T,H,D], all keys and values [B,G,K,D].

    Those of a cache in pages are copied together, since PyTorch's products take rectangles. Without a cache they are
    those of a pass that is a rectangle.
    """
    q, k, v = heads(qkv, step, spec, extras, empty=empty)
    if kv is None:
        keys, values = (part.unflatten(0, (len(step.spans), -1)).transpose(1, 2) for part in (k, v))
        return q, keys, values
    (keys, values), table = kv.room(step), kv.block_table
    if table is None:
        keys[step.rows, :, step.columns] = k
        values[step.rows, :, step.columns] = v
        return q, keys, values
    page = keys.shape[2]
    pages, columns = table[step.rows, step.columns // page], step.columns % page
    keys[pages, :, columns] = k
    values[pages, :, columns] = v
    blocks = table[:, : -(-step.extent // page)]
    keys, values = (gathered(part, blocks, name, empty) for part, name in ((keys, "keys"), (values, "values")))
    return q, keys[:, :, : step.extent], values[:, :, : step.extent]


def gathered(pages: Tensor, blocks: Tensor, name: str, empty: Empty) -> Tensor:
    """Pages [P,G,page,D] in the order of a block table [B,blocks] -> [B,G,blocks*page,D]."""
    (B, num_blocks), (_, G, page, D) = blocks.shape, pages.shape
    head = torch.arange(G, device=blocks.device)
    chosen = (blocks[:, None] * G + head[:, None]).flatten()
    out = empty(name, (len(chosen), page, D), pages)
    return torch.index_select(pages.flatten(0, 1), 0, chosen, out=out).view(B, G, num_blocks * page, D)


@serves_any_pads
def dense_mask(step: Step, spec: Spec, like: Tensor, *, empty: Empty) -> Tensor:
    """An additive mask [B,1,Q,K]: 0 where a query may look, and half the lowest number elsewhere.

    Half of it, so that no sum with a score overflows: the row of a pad is hidden altogether, and would become NaN.
    """
    B, K = len(step.num_pad), step.extent
    mask = empty("mask", (B, 1, len(step.ids) // B, K), like).zero_()
    key = torch.arange(K, device=like.device)
    hidden = key < step.num_pad[step.rows, None]
    if spec.causal:
        hidden = hidden | (key > step.columns[:, None])
    if spec.window is not None:
        hidden = hidden | (key <= step.columns[:, None] - spec.window)
    return mask.masked_fill_(hidden.view(mask.shape), torch.finfo(mask.dtype).min / 2)


@serves_any_pads
def masked_attention(
    qkv: Tensor, kv: KVLayer | None, step: Step, spec: Spec, extras: Extras = NO_EXTRAS, *, mask: Tensor, empty: Empty
) -> Tensor:
    """Attention as EET's baseline had it: every score is computed, then a mask [B,1,Q,K] is added.

    [T,(H+2G)D] -> [T,HD].
    """
    q, keys, values = append(qkv, kv, step, spec, extras, empty=empty)
    (B, G, K, D), (T, H, _) = keys.shape, q.shape
    if H > G:
        keys, values = keys.repeat_interleave(H // G, 1), values.repeat_interleave(H // G, 1)
    q = q.unflatten(0, (B, -1)).transpose(1, 2).mul(D**-0.5 if spec.scale is None else spec.scale)
    scores = torch.matmul(q, keys.transpose(-1, -2), out=empty("scores", (B, H, T // B, K), q))
    scores = torch.add(scores, mask, out=empty("masked_scores", scores.shape, q))
    weights = torch.softmax(scores, -1, out=empty("attention_weights", scores.shape, q))
    mixed = torch.matmul(weights, values, out=empty("mixed", q.shape, q))
    return empty("attended", (T, H * D), qkv).view(B, -1, H, D).copy_(mixed.transpose(1, 2)).view(T, H * D)


def attention(
    qkv: Tensor, kv: KVLayer | None, step: Step, spec: Spec, extras: Extras = NO_EXTRAS, *, empty: Empty
) -> Tensor:
    """Attention without a mask: a query sees columns num_pad .. its own, or the last of them. [T,(H+2G)D] -> [T,HD];
    a pad's own is 0.

    Plain PyTorch has no call for rows with different numbers of pads: rows that differ get a call each, by the host's
    `step.spans`. So a captured call serves the same pads alone.
    """
    if kv is None:
        return _attention_within(qkv, step, spec, extras, empty)
    q, keys, values = append(qkv, kv, step, spec, extras, empty=empty)
    out, B, (T, H, D) = empty("attended", q.shape, q), len(step.spans), q.shape
    if out.is_meta:  # a rehearsal only wants to know what was asked for
        return out.flatten(1)
    if sum(span.count for span in step.spans) < T:
        out.zero_()
    first, count, num_pad = step.spans[0]
    alike = B * count == T and all(span == (row * count, count, num_pad) for row, span in enumerate(step.spans))
    for rows in [slice(0, B)] if alike else [slice(row, row + 1) for row in range(B)]:
        first, count, num_pad = step.spans[rows.start]
        if not count:  # a row that this pass does not read
            continue
        begin = num_pad
        if spec.window is not None and step.exact:
            begin = max(begin, step.extent - count + 1 - spec.window)  # what the first of the queries sees
        now, seen = slice(first, first + count * (rows.stop - rows.start)), slice(begin, step.extent)
        bound = _bound(step.columns[now].view(-1, 1, count, 1), begin, step, spec)
        out[now] = _attend(q[now].view(-1, count, H, D), keys[rows, :, seen], values[rows, :, seen], bound, spec)
    return out.flatten(1)


def _bound(query: Tensor, begin: int, step: Step, spec: Spec) -> Tensor | None:
    """Which of the columns [begin, step.extent) each query [R,1,Q,1] sees; None: all up to its own, the newest ones."""
    windowed = spec.window is not None and step.extent - begin > spec.window
    if step.exact and not windowed:
        return None
    column = torch.arange(begin, step.extent, device=query.device)
    newest = query if spec.causal else query[:, :, -1:]
    bound = column <= newest
    return bound if spec.window is None else bound & (column > query - spec.window)


def _attend(q: Tensor, k: Tensor, v: Tensor, bound: Tensor | None, spec: Spec) -> Tensor:
    """q [R,Q,H,D], k and v [R,G,K,D] -> [RQ,H,D]; the queries are the newest Q columns, or see what `bound` allows."""
    causal = bound is None and spec.causal and q.shape[1] > 1
    grouped: dict[str, Any] = {"enable_gqa": True} if spec.heads > spec.kv_heads else {}
    if spec.scale is not None:
        grouped["scale"] = spec.scale
    mixed = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bound, is_causal=causal, **grouped)
    return mixed.transpose(1, 2).flatten(0, 1)


class _Rows(NamedTuple):
    """Rows of a pass with as many real tokens each, which lie as far from each other."""

    first: int
    count: int  # type: ignore[assignment]  # not tuple.count
    apart: int  # tokens from the first of a row to the first of the next one
    num: int

    def of(self, x: Tensor) -> Tensor:
        """Their part of x [T,...], as a view [R,Q,...]."""
        last = self.first + self.apart * (self.num - 1) + self.count
        return x[self.first : last].unfold(0, self.count, self.apart).movedim(-1, 1)


def _attention_within(qkv: Tensor, step: Step, spec: Spec, extras: Extras, empty: Empty) -> Tensor:
    """Attention among the real tokens of each row of the pass: one call for neighbours of the same length."""
    q, k, v = heads(qkv, step, spec, extras, empty=empty)
    out = empty("attended", q.shape, q)
    if out.is_meta:
        return out.flatten(1)
    if sum(span.count for span in step.spans) < len(q):
        out.zero_()
    for rows in _alike(step.spans):
        bound = None
        if spec.window is not None and spec.window < rows.count:
            place = torch.arange(rows.count, device=q.device)
            ago = place[:, None] - place
            bound = (ago < spec.window) & (ago >= 0) if spec.causal else ago < spec.window
        keys, values = (rows.of(part).transpose(1, 2) for part in (k, v))
        mixed = _attend(rows.of(q), keys, values, bound, spec)
        rows.of(out).copy_(mixed.unflatten(0, (rows.num, rows.count)))
    return out.flatten(1)


def _alike(spans: Sequence[Span]) -> list[_Rows]:
    """The rows of a pass in its order, neighbours of the same length together."""
    found: list[_Rows] = []
    for first, count, _ in spans:
        if found and found[-1].count == count:
            before = found[-1]
            apart = first - before.first if before.num == 1 else before.apart
            if first == before.first + apart * before.num:
                found[-1] = before._replace(apart=apart, num=before.num + 1)
                continue
        found.append(_Rows(first, count, count, 1))
    return found
