"""The values that ops pass around.

T tokens, B rows of the batch, C channels, F channels inside a layer, N outputs, H heads, G KV heads, D head dim,
K columns of the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Norm(NamedTuple):
    """A layer norm, or an RMS norm where there is no bias."""

    weight: Tensor  # [C]
    bias: Tensor | None  # [C]
    eps: float


class Linear(NamedTuple):
    """A linear layer. With a scale its weight is `weight * scale`; ops dispatch on that."""

    weight: Tensor  # [N,C]; int8 where there is a scale
    bias: Tensor | None  # [N]
    scale: Tensor | None = None  # [N,groups] fp32, see ops/int8.py


class Layer(NamedTuple):
    """One transformer layer: attention, then a feed-forward network, each with a norm.

    A decoder's norms are before them, an encoder's behind their residuals (post-norm).
    """

    norm_1: Norm
    qkv: Linear  # [(H+2G)D,C]
    proj: Linear  # [C,HD]
    norm_2: Norm
    fc_1: Linear  # [F,C], or [2F,C] where the activation is gated: all gates, then what they let through
    fc_2: Linear  # [C,F]
    q_norm: Norm | None = None  # of each head's queries, before they are rotated
    k_norm: Norm | None = None


class Spec(NamedTuple):
    """What is fixed about an attention. Hashable, so that a kernel can be chosen by it once."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None  # a query sees so many columns, its own among them
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    rope: bool = False  # queries and keys are rotated by their positions, one half of a head against the other
    rope_factor: float = 1.0  # of the rotation's cosines and sines


class Extras(NamedTuple):
    """The tensors that some attentions need beside queries, keys and values."""

    q_norm: Norm | None = None  # [D] of each head
    k_norm: Norm | None = None
    inv_freq: Tensor | None = None  # [D/2] fp32, of rotary positions: radians from one position to the next


NO_EXTRAS = Extras()


class Span(NamedTuple):
    """What the host knows of one row in a step: its real tokens are `first .. first + count - 1` of T."""

    first: int
    count: int  # type: ignore[assignment]  # not tuple.count
    num_pad: int


class Step(NamedTuple):
    """What one forward pass reads. Tensors are on the device; the rest is known to the host.

    A decode step may be captured and replayed for batches with other pads. What the host reads then stays as it was:
    an op that reads of `spans` more than how many there are is captured anew for them, one that is declared to
    `ops.pads.serves_any_pads` is not. A KV cache's `room` reads `extent` alone.
    """

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64  place in its own sequence
    rows: Tensor  # [T] int64  row of the batch
    columns: Tensor  # [T] int64  column of the KV cache
    last: Tensor  # [B] int64  index in T of each row's newest token
    num_pad: Tensor  # [B] int64  columns before a row's first token
    first: Tensor  # [B] int64  index in T of each row's first real token
    count: Tensor  # type: ignore[assignment]  # [B] int64  number of each row's real tokens
    spans: tuple[Span, ...]  # B times: first, count and num_pad, on the host
    extent: int  # columns [0, extent) of the cache hold everything that a query may see
    exact: bool = True  # False: extent was rounded up, only the device's `columns` tell where a query ends


class Sampling(NamedTuple):
    """How the next token is drawn. A row's noise is the same in every recipe, whoever shares the batch."""

    temperature: float  # 0: greedy
    top_k: int  # 0: no limit
    top_p: float  # 1: no limit
    noise: Tensor  # [B] int64, on the device, so that a captured step can be replayed with other draws: `noise_keys`

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def most_words(self, num_words: int) -> int:
        """How many of so many words the top-k lets stay, but for those that tie."""
        return self.top_k if 0 < self.top_k < num_words and not self.greedy else num_words


class KVLayer(Protocol):
    """One layer's keys and values: a rectangle of columns, or pages that lie anywhere."""

    num_heads: int
    head_dim: int

    @property
    def block_table(self) -> Tensor | None:
        """None: column c of row b is [b,:,c]. A table [B,blocks] int32: it is [table[b,c // page],:,c % page].

        Columns that no query sees may share a page; pages of a row are its own otherwise.
        """
        ...

    def room(self, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values, where the attention op writes the new columns and reads [0, step.extent).

        Without a block table [B,G,K,D] with K = step.extent, with one the pool of pages [P,G,page,D].
        """
        ...


class State(NamedTuple):
    """What decoding carries from pass to pass, all of it on the device and int64, updated in place.

    A row goes on to its limit and stays there. So one captured step serves rows that are done, or were never there.
    """

    tokens: Tensor  # [B,S]  the canvas: prompts, then what was generated; a column's numbers are neighbours
    end: Tensor  # [B]  first column after the prompt
    limit: Tensor  # [B]  the last column that a row comes to
    columns: Tensor  # [B]  first column that the next pass reads
    ids: Tensor  # [B]  what stands in that column
    positions: Tensor  # [B]  place in its own sequence of what stands there
    log: Tensor  # [R,B]  what `ids` were after each of the last R passes: after pass i in row i % R
    num_passes: Tensor  # [1]


Empty = Callable[..., Tensor]
"""`empty(name, shape, like, dtype=None)`: an op's only source of memory; not initialized."""


def fresh(name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The plainest `Empty`: a new tensor for whoever asks."""
    return like.new_empty(shape, dtype=dtype)
