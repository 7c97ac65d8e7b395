"""Attention that reads lengths from the device alone: every token against every other of its pass, in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eet_lab.ops.attention import append, heads
from eet_lab.ops.fits import reads_rows_on_device
from eet_lab.ops.types import NO_EXTRAS
from eet_lab.parts import Parts


@reads_rows_on_device
def attention(qkv, kv, batch, spec, extras=NO_EXTRAS, *, empty, drop=None):
    assert spec.window is None and extras.bias is None
    if kv is not None:
        return _over_the_cache(*append(qkv, kv, batch, spec, extras, empty=empty), batch, spec)
    seen = (batch.rows[:, None] == batch.rows) & (batch.columns >= batch.keys.begin[batch.rows])  # but no pad
    if spec.causal:
        seen = seen & (batch.columns <= batch.columns[:, None])
    return _attended(*heads(qkv, batch, spec, extras, empty=empty), seen, None, spec, drop)


def _over_the_cache(q: Tensor, keys: Tensor, values: Tensor, batch, spec) -> Tensor:
    """Queries [T,H,D] of rows whose columns are known to the device alone, and keys [B,G,K,D] -> [T,HD]."""
    column = torch.arange(keys.shape[2])
    seen = (column >= batch.keys.begin[batch.rows, None]) & (column <= batch.columns[:, None])
    place = torch.arange(len(q)) - batch.first[batch.rows]
    is_pad = (place < 0) | (place >= batch.count[batch.rows])
    k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, 1)[batch.rows] for part in (keys, values))
    scores = (q[:, :, None] * k).sum(-1) * (spec.head_dim**-0.5 if spec.scale is None else spec.scale)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = (weights[..., None] * v).sum(2).masked_fill(is_pad[:, None, None], 0)
    return out.flatten(1)


def cross_attention(q, kv, batch, source, spec, *, mask=None, empty, drop=None):
    seen = batch.rows[:, None] == source.rows
    return _attended(q.unflatten(-1, (-1, spec.head_dim)), *kv, seen, source.positions[None], spec, drop)


def _attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, keys, spec, drop) -> Tensor:
    """[T,H,D] and [S,G,D] -> [T,HD]."""
    k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, 1).transpose(0, 1) for part in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * (spec.head_dim**-0.5 if spec.scale is None else spec.scale)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)[None]
    dropped = drop.of_attention() if drop is not None else None
    if dropped is not None:
        weights = dropped(weights, tokens=torch.arange(len(q), device=q.device)[None], keys=keys)
    return (weights[0] @ v).transpose(0, 1).flatten(1)


def by_device(parts: Parts) -> Parts:
    return replace(parts, train_ops=replace(parts.train_ops, attention=attention, cross_attention=cross_attention))
