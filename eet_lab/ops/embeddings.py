"""Embeddings in plain PyTorch. T tokens, C channels, V vocabulary, S positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding

from eet_lab.ops.noise import Dropout, all_kept
from eet_lab.ops.norms import norm
from eet_lab.ops.types import Empty, Norm


def embedded(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    token_embedding: Tensor,
    position_embedding: Tensor | None,
    type_embedding: Tensor | None,
    *,
    scale: float = 1.0,
    padding: int | None = None,
    empty: Empty,
    drop: Dropout = all_kept,
) -> Tensor:
    """Token embedding times `scale`, plus position and type embedding, where there are such: ids, positions and types
    [T], tables [V,C], [S,C] and [types,C] -> [T,C].

    Without types all tokens are of type 0. To look up the token `padding` trains nothing, as in PyTorch.
    """
    out = empty("embedded", (len(ids), token_embedding.shape[1]), token_embedding)
    if out is None and padding is not None:
        x = embedding(ids, token_embedding, padding)
    else:
        x = torch.index_select(token_embedding, 0, ids, out=out)
    if scale != 1:
        x.mul_(scale)
    if position_embedding is not None:
        x.add_(torch.index_select(position_embedding, 0, positions, out=empty("place", x.shape, x)))
    if type_embedding is not None:
        kind = type_embedding[0]
        if types is not None:
            kind = torch.index_select(type_embedding, 0, types, out=empty("kind", x.shape, x))
        x.add_(kind)
    return drop(x)


def embed(
    ids: Tensor,
    positions: Tensor,
    token_embedding: Tensor,
    position_embedding: Tensor | None,
    *,
    scale: float = 1.0,
    padding: int | None = None,
    empty: Empty,
    drop: Dropout = all_kept,
    embedded: Callable = embedded,
) -> Tensor:
    """Token times `scale` plus position embedding, if there is one: ids and positions [T] -> [T,C]."""
    tables = None, token_embedding, position_embedding, None
    return embedded(ids, positions, *tables, scale=scale, padding=padding, empty=empty, drop=drop)


def dropped(x: Tensor, drop: Dropout) -> Tensor:
    """What a training pass keeps of hidden states: [T,C] -> [T,C]."""
    return drop(x)


def embed_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    token_embedding: Tensor,
    position_embedding: Tensor,
    type_embedding: Tensor | None,
    norm_w: Norm,
    *,
    scale: float = 1.0,
    padding: int | None = None,
    empty: Empty,
    drop: Dropout = all_kept,
    embedded: Callable = embedded,
    norm: Callable = norm,
    dropped: Callable = dropped,
) -> Tensor:
    """norm(token * scale + position + type embedding): ids, positions and types [T] -> [T,C]; see `embedded`."""
    tables = types, token_embedding, position_embedding, type_embedding
    x = embedded(ids, positions, *tables, scale=scale, padding=padding, empty=empty)
    return dropped(norm(x, norm_w, empty=empty), drop)
