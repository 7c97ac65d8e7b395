"""A decoder as a PyTorch user writes it to be fast: a KV cache of fixed length, SDPA, a decode step in a CUDA graph.

B rows, Q queries a row, S columns of the cache, C channels, H heads, G KV heads, D head dim, V vocabulary.
Source of the idea: gpt-fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eet_lab.memory.lifetimes import aligned
from eet_lab.models.decoder import Decoder
from eet_lab.ops.types import Norm

Rows = Sequence[Sequence[int]]

ACTS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
GATED = {"swiglu": F.silu, "geglu": ACTS["gelu_tanh"]}
ALIGNED_COLUMNS = 64
"""Columns of the cache are a multiple of it, so that SDPA need not copy the mask."""


class StaticDecoder:
    """One left-padded batch: its KV cache, and a greedy decoder over PyTorch's own functions.

    A step reads its token and its column from the device and writes both, so a capture of it can be replayed.
    """

    def __init__(self, model: Decoder, rows: Rows, new_tokens: int) -> None:
        self.model, config, lengths = model, model.config, [len(row) for row in rows]
        B, self.width = len(rows), max(lengths)
        self.ids = torch.zeros(B, self.width, dtype=torch.long, device=model.device)
        self.num_pad = torch.zeros(B, 1, dtype=torch.long, device=model.device)
        self.ragged = min(lengths) < self.width
        self.receive(rows)
        self.capacity = aligned(self.width + new_tokens, ALIGNED_COLUMNS)
        shape = (len(model.layers), 2, B, config.num_kv_heads, self.capacity, config.head_dim)
        self.cache = model.token_embedding.new_zeros(shape)
        self.token = torch.zeros(B, 1, dtype=torch.long, device=model.device)
        self.column = torch.zeros(1, dtype=torch.long, device=model.device)
        self.tokens = torch.zeros(B, self.capacity, dtype=torch.long, device=model.device)

    def receive(self, rows: Rows) -> None:
        """Send prompts of the same lengths to the device, where a captured step expects them."""
        ids, attended = left_padded(rows, self.ids.device)
        self.ids.copy_(ids)
        self.num_pad.copy_(self.width - attended.sum(1, keepdim=True))

    def prefill(self) -> None:
        """Read the prompts and choose each row's first token."""
        self.column.fill_(self.width - 1)
        columns = torch.arange(self.width, device=self.ids.device)
        # Rows of one length need no mask: SDPA then takes its fastest kernel.
        causal = not self.ragged and (self.model.config.window or self.width) >= self.width
        self._keep(self._forward(self.ids, columns, self.width, causal))

    def step(self) -> None:
        """One more token for every row."""
        self.column.add_(1)
        self._keep(self._forward(self.token, self.column, self.capacity, causal=False))

    def _keep(self, token: Tensor) -> None:
        self.token.copy_(token)
        self.tokens.index_copy_(1, self.column, token)

    def _forward(self, ids: Tensor, columns: Tensor, max_kv: int, causal: bool) -> Tensor:
        """Ids [B,Q] in `columns` [Q], keys of columns [0, max_kv): the greedy choice after the last, [B,1]."""
        model, (B, Q), spec = self.model, ids.shape, self.model.config.spec
        mask = None if causal else self._mask(columns, max_kv)
        positions = (columns - self.num_pad).clamp(min=0)
        x = F.embedding(ids, model.token_embedding)
        if model.position_embedding is not None:
            x = x + F.embedding(positions + model.config.first_position, model.position_embedding)
        turn = None if model.inv_freq is None else _turn(positions, model.inv_freq, spec.rope_factor, x.dtype)
        for w, cache in zip(model.layers, self.cache, strict=True):
            qkv = F.linear(norm(x, w.norm_1), w.qkv.weight, w.qkv.bias).view(B, Q, -1, spec.head_dim).transpose(1, 2)
            q, k, v = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
            if w.q_norm is not None and w.k_norm is not None:
                q, k = norm(q, w.q_norm), norm(k, w.k_norm)
            if turn is not None:
                q, k = _turned(q, *turn), _turned(k, *turn)
            keys, values = cache[0], cache[1]
            keys.index_copy_(2, columns, k)
            values.index_copy_(2, columns, v)
            mixed = _attention(q, keys[:, :, :max_kv], values[:, :, :max_kv], mask, causal, spec.scale)
            x = x + F.linear(mixed.transpose(1, 2).reshape(B, Q, -1), w.proj.weight, w.proj.bias)
            h = _activated(F.linear(norm(x, w.norm_2), w.fc_1.weight, w.fc_1.bias), model.config.act)
            x = x + F.linear(h, w.fc_2.weight, w.fc_2.bias)
        return F.linear(norm(x[:, -1:], model.norm), model.head.weight).argmax(-1)

    def _mask(self, columns: Tensor, max_kv: int) -> Tensor:
        """What each query may see, [B,1,Q,max_kv]. A pad sees itself, since a softmax over nothing is NaN."""
        key, query = torch.arange(max_kv, device=columns.device), columns[:, None]
        seen = (key <= query) & (key >= self.num_pad[:, :, None]) | (key == query)
        if (window := self.model.config.window) is not None:
            seen &= key > query - window
        return seen[:, None]


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Of queries [B,H,Q,D] and keys [B,G,S,D]. SDPA's fast kernels take a mask, or grouped heads, but not both."""
    (B, H, Q, D), G = q.shape, keys.shape[1]
    if H == G:
        return F.scaled_dot_product_attention(q, keys, values, mask, 0.0, causal, scale=scale)
    if Q == 1:  # the queries of a group are rows of one head
        grouped = q.reshape(B, G, H // G, D)
        return F.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale).reshape(B, H, Q, D)
    if mask is None:
        return F.scaled_dot_product_attention(q, keys, values, None, 0.0, causal, scale=scale, enable_gqa=True)
    keys, values = (part.repeat_interleave(H // G, 1) for part in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)


def _turn(positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B,1,Q,D/2] of rotary positions [B,Q]."""
    angles = (positions[..., None] * inv_freq)[:, None]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _activated(x: Tensor, act: str) -> Tensor:
    if act not in GATED:
        return ACTS[act](x)
    gate, value = x.chunk(2, -1)
    return GATED[act](gate) * value


def norm(x: Tensor, w: Norm) -> Tensor:
    """Layer norm, or RMS norm without a bias."""
    if w.bias is None:
        return F.rms_norm(x, x.shape[-1:], w.weight, w.eps)
    return F.layer_norm(x, x.shape[-1:], w.weight, w.bias, w.eps)


def left_padded(rows: Rows, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B,S] and attention mask [B,S]. Timed with every run, so laid out as quickly as our own prompts are."""
    lengths = np.array([len(row) for row in rows])
    longest = lengths.max()
    ids = np.zeros((len(rows), longest), np.int64)
    for to, row in zip(ids, rows, strict=True):
        to[longest - len(row) :] = row
    attended = np.arange(longest) >= longest - lengths[:, None]
    return torch.from_numpy(ids).to(device), torch.from_numpy(attended.astype(np.int64)).to(device)


def compiled(batch: StaticDecoder, **how: Any) -> Callable[[], None]:
    """A batch's step, compiled as one graph; the first call takes a minute for a large model."""
    return torch.compile(batch.step, fullgraph=True, **(how or {"options": {"coordinate_descent_tuning": True}}))
