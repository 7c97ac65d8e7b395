"""Attention of rows to rows in plain PyTorch: one call for neighbours of the same lengths.

T tokens, S source tokens, R rows of the same lengths, Q queries and K columns of each, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from eet_lab.errors import KernelError
from eet_lab.ops.noise import Dropout, all_kept
from eet_lab.ops.types import NO_EXTRAS, Batch, Empty, Extras, Spec


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    source: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    empty: Empty,
    drop: Dropout = all_kept,
) -> Tensor:
    """Each row's queries [T,H,D] see the real tokens of its source, keys and values [S,G,D] -> [T,HD]: one call for
    neighbours of the same lengths. A pad's own output is 0. `source` is `batch` where tokens see each other.
    """
    out = empty("attended", q.shape, q)
    if out is not None and out.is_meta:  # a meta trace only records what was asked for
        return out.flatten(1)
    spans = known_spans(batch), known_spans(source)
    if out is None:
        out = torch.zeros_like(q)  # what each call gives is written into it, which PyTorch differentiates
    elif sum(count for _, count in spans[0]) < len(q):
        out.zero_()
    places, dropped = torch.arange(len(q), device=q.device), drop.of_attention()
    for rows, seen in together(*map(alike, spans)):
        if not rows.count or not seen.count:  # an empty text, such as those that fill a pass up
            continue
        bound = _bound(rows.count, spec, extras, q.device)
        keys, values = (seen.of(part).transpose(1, 2) for part in (k, v))
        if dropped is None:
            mixed = attend(rows.of(q), keys, values, bound, spec)
        else:
            kept = partial(dropped, tokens=rows.of(places), keys=seen.of(source.positions))
            mixed = attend_dropping(rows.of(q), keys, values, bound, spec, kept)
        rows.of(out).copy_(mixed.unflatten(0, (rows.num, rows.count)))
    return out.flatten(1)


def _bound(count: int, spec: Spec, extras: Extras, device: torch.device) -> Tensor | None:
    """What so many tokens of a row see of each other, or get added to their scores; None: all, or those up to them."""
    window = count if spec.window is None else spec.window
    if window >= count and extras.bias is None:
        return None
    place, bound = torch.arange(count, device=device), None
    if window < count:
        ago = place[:, None] - place
        bound = (ago < window) & (ago >= 0) if spec.causal else ago < window
    return bound if extras.bias is None else biased(bound, extras.bias, spec, place, place)


def attend(q: Tensor, k: Tensor, v: Tensor, bound: Tensor | None, spec: Spec, dropout_p: float = 0.0) -> Tensor:
    """q [R,Q,H,D], k and v [R,G,K,D] -> [RQ,H,D]; the queries are the newest Q columns, or see what `bound` allows, or
    get it added to their scores. What `dropout_p` drops is PyTorch's choice.
    """
    causal = bound is None and spec.causal and q.shape[1] > 1
    if causal and q.shape[1] < k.shape[2]:  # PyTorch's causal mask ends at the corner of a square
        ago = torch.arange(q.shape[1], device=q.device)[:, None] + (k.shape[2] - q.shape[1])
        bound, causal = torch.arange(k.shape[2], device=q.device) <= ago, False
    grouped: dict[str, Any] = {"enable_gqa": True} if spec.heads > spec.kv_heads else {}
    if spec.scale is not None:
        grouped["scale"] = spec.scale
    mixed = scaled_dot_product_attention(q.transpose(1, 2), k, v, bound, dropout_p, causal, **grouped)
    return mixed.transpose(1, 2).flatten(0, 1)


def attend_dropping(
    q: Tensor, k: Tensor, v: Tensor, bound: Tensor | None, spec: Spec, dropped: Callable[[Tensor], Tensor]
) -> Tensor:
    """The same of tokens among each other, with some weights dropped: PyTorch's call draws noise of its own."""
    Q, D, group = q.shape[1], spec.head_dim, spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q.transpose(1, 2) @ k.transpose(-1, -2) * (D**-0.5 if spec.scale is None else spec.scale)
    if bound is None and spec.causal:
        bound = torch.ones(Q, Q, dtype=torch.bool, device=q.device).tril()
    if bound is not None:
        scores = scores.masked_fill(~bound, -torch.inf) if bound.dtype == torch.bool else scores + bound
    return (dropped(scores.softmax(-1)) @ v).transpose(1, 2).flatten(0, 1)


def relative_bias(table: Tensor, spec: Spec, query: Tensor, key: Tensor) -> Tensor:
    """What the distance from a query's column [...,Q] to a key's [...,K] adds to scores: table [buckets,H] ->
    [...,H,Q,K].

    Half of the buckets are for one distance each, and the others for ever more of them. Where attention is not causal,
    keys behind the query have buckets of their own. Source: T5 (Raffel et al., 2020), as transformers computes it.
    """
    away, num = key[..., None, :] - query[..., :, None], len(table)
    first = torch.zeros_like(away)
    if spec.causal:
        away = -away.clamp(max=0)
    else:
        num //= 2
        first, away = (away > 0).long() * num, away.abs()
    exact = num // 2
    share = torch.log(away.float() / exact) / math.log(spec.max_distance / exact)
    far = (exact + (share * (num - exact)).long()).clamp(max=num - 1)
    return embedding(first + torch.where(away < exact, away, far), table).movedim(-1, -3)


def biased(bound: Tensor | None, table: Tensor, spec: Spec, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores of queries in columns [Q] and keys in columns [K]: [H,Q,K], hidden ones too."""
    bias = relative_bias(table, spec, query, key)
    if bound is None and spec.causal and len(query) > 1:
        bound = key <= query[:, None]
    return bias if bound is None else bias.masked_fill(~bound, -torch.inf)


class Rows(NamedTuple):
    """Rows of a pass with as many real tokens each, which lie as far from each other."""

    first: int
    count: int  # type: ignore[assignment]  # not tuple.count
    apart: int  # tokens from the first of a row to the first of the next one
    num: int

    def of(self, x: Tensor) -> Tensor:
        """Their part of x [T,...], as a view [R,Q,...]."""
        last = self.first + self.apart * (self.num - 1) + self.count
        return x[self.first : last].unfold(0, self.count, self.apart).movedim(-1, 1)


def known_spans(batch: Batch) -> Sequence[tuple[int, int]]:
    """The first token and the number of tokens of each row; KernelError where the host does not know them."""
    if batch.spans is None:
        raise KernelError(
            "A captured pass has texts of different lengths, which this attention would read from the host. Turn "
            "varlen_attention on, which reads them from the device, or leave out what captures: cuda_graphs, and in "
            "training captured_steps."
        )
    return batch.spans


def alike(spans: Sequence[tuple[int, int]]) -> list[Rows]:
    """The rows of a pass in its order, neighbours of the same length together."""
    found: list[Rows] = []
    for first, count in spans:
        if found and found[-1].count == count:
            before = found[-1]
            apart = first - before.first if before.num == 1 else before.apart
            if first == before.first + apart * before.num:
                found[-1] = before._replace(apart=apart, num=before.num + 1)
                continue
        found.append(Rows(first, count, count, 1))
    return found


def together(queries: list[Rows], keys: list[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """The same rows of both, as many at a time as are alike in both."""
    left = deque(queries), deque(keys)
    while left[0]:
        num = min(each[0].num for each in left)
        yield left[0][0]._replace(num=num), left[1][0]._replace(num=num)
        for each in left:
            rows = each.popleft()
            if rows.num > num:
                each.appendleft(rows._replace(first=rows.first + num * rows.apart, num=rows.num - num))
