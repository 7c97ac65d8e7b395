"""The values that ops pass around.

T tokens, B rows of the batch, C channels, F channels inside a layer, N outputs, H heads, G KV heads, D head dim,
K columns of the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

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


class Cross(NamedTuple):
    """A decoder layer's attention to what an encoder has read."""

    norm: Norm
    q: Linear  # [HD,C]
    kv: Linear  # [2GD,C]
    proj: Linear  # [C,HD]


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
    cross: Cross | None = None  # between the two


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
    max_distance: int = 0  # from which on relative positions share a bucket; 0: there is no bias of scores


class Extras(NamedTuple):
    """The tensors that some attentions need beside queries, keys and values."""

    q_norm: Norm | None = None  # [D] of each head
    k_norm: Norm | None = None
    inv_freq: Tensor | None = None  # [D/2] fp32, of rotary positions: radians from one position to the next
    bias: Tensor | None = None  # [buckets,H]  what a relative position adds to the scores


NO_EXTRAS = Extras()


KV = tuple[Tensor, Tensor]
"""A layer's keys and values. Without a block table, column c of row b is [b,:,c] of [B,G,K,D], where K is the pass's
`max_kv`; with one they are the pool of pages [P,G,page,D]. Those of cross attention are [S,G,D], a source token each.
"""


class Keys(NamedTuple):
    """Which columns of the KV cache each row may see, and where they lie: from `begin` to the query's own column.

    Columns that no query sees may share a page; pages of a row are its own otherwise.
    """

    begin: Tensor  # [B] int64  columns before the first that a row may see: its pads
    table: Tensor | None = None  # [B,blocks] int32: column c of row b is [table[b,c // page],:,c % page]
    spans: tuple[tuple[int, int], ...] | None = None  # begin and end of each row, on the host
    padded: bool = False  # whether any row of this batch has pads
    window: int | None = None  # where each row reads one token: `begin` is no earlier than such a window's first column


class Batch(NamedTuple):
    """What one forward pass reads. Tensors are on the device; the host's `max_q` and `max_kv` bound a kernel's grid.

    `spans` and `keys.spans` are what the host knows of each row. They are None in a step that is captured: its replays
    serve other rows, so what an op needs to know of them it reads on the device.
    """

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64  place in its own sequence
    rows: Tensor  # [T] int64  row of the batch
    columns: Tensor  # [T] int64  column of the KV cache
    last: Tensor  # [B] int64  index in T of each row's newest token
    first: Tensor  # [B] int64  index in T of each row's first real token
    count: Tensor  # type: ignore[assignment]  # [B] int64  number of each row's real tokens
    keys: Keys
    max_q: int  # most real tokens of a row
    max_kv: int  # columns [0, max_kv) hold everything that a query may see
    spans: tuple[tuple[int, int], ...] | None = None  # first and count of each row, on the host
    cu_seqlens: Tensor | None = None  # [B+1] int32  where rows begin, and the last one ends
    num_dummy: int = 0  # tokens of no row, which come last and fill the pass up to one of few sizes

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.first)

    @property
    def num_read(self) -> int:
        """Tokens of rows, their pads among them."""
        return len(self.rows) - self.num_dummy

    @property
    def one_each(self) -> bool:
        """Whether every row reads exactly one token, and there are no others."""
        return self.max_q == 1 and len(self.rows) == self.num_rows and not self.num_dummy


class Source(NamedTuple):
    """What cross attention looks at: each layer's keys and values, and where the tokens of each row are in them."""

    batch: Batch
    layers: Sequence[KV]


class Attend(Protocol):
    """Attention of one pass. It knows the batch and the KV cache, so that a model need not."""

    def __call__(self, layer: int, qkv: Tensor, spec: Spec, extras: Extras = ..., /) -> Tensor:
        """Queries, keys and values [T,(H+2G)D] of a layer -> [T,HD]."""

    def cross(self, layer: int, q: Tensor, spec: Spec, /) -> Tensor:
        """Queries [T,HD] of a layer, which look at the source -> [T,HD]."""


class Choice(IntEnum):
    """What chooses a token, from the plainest to the most general: each serves what the plainer ones ask for, too."""

    GREEDY = 0  # the largest logit
    DRAW = 1  # a draw from all tokens
    LIMITED = 2  # a draw after top-k and top-p

    @classmethod
    def of(cls, temperature: float, top_k: int, top_p: float, num_tokens: int) -> Choice:
        """The plainest one that does for a row, of so many tokens in all."""
        if temperature == 0:
            return cls.GREEDY
        return cls.LIMITED if 0 < top_k < num_tokens or top_p < 1 else cls.DRAW


class Sampling(NamedTuple):
    """How each row's next token is chosen. A row gets the same token in every recipe, whoever shares the batch.

    The values are on the device, where a captured step reads those of the requests that it is replayed for. What the
    host knows of them chooses the kernels: `choice` serves all rows.
    """

    choice: Choice
    noise: Tensor  # [B] int64: `noise_keys`
    temperature: Tensor  # [B] fp32; 0: greedy
    top_k: Tensor  # [B] int64; 0: no limit
    top_p: Tensor  # [B] fp32; 1: no limit

    @classmethod
    def of(cls, noise: Tensor, asked: Sequence[tuple[float, int, float]], num_tokens: int) -> Sampling:
        """Rows with these noise keys [B], which ask for a temperature, a top-k and a top-p each."""
        choice = max((Choice.of(*each, num_tokens) for each in asked), default=Choice.GREEDY)
        values = torch.tensor(asked, dtype=torch.float64).reshape(len(asked), 3).T  # it holds any top-k
        dtypes = torch.float32, torch.int64, torch.float32
        limits = (part.to(noise.device, dtype) for part, dtype in zip(values, dtypes, strict=True))
        return cls(choice, noise, *limits)

    @property
    def greedy(self) -> bool:
        return self.choice == Choice.GREEDY


class TokenBuffer(NamedTuple):
    """The tokens of each slot, and how far it is: on the device, int64, updated in place from pass to pass.

    A slot goes on to its limit and stays there. So one captured step serves slots that are done, or were never used.
    """

    tokens: Tensor  # [B,S]  prompts, then what was generated; a column's numbers are neighbours
    end: Tensor  # [B]  first column after the prompt
    limit: Tensor  # [B]  the last column that a row comes to
    columns: Tensor  # [B]  first column that the next pass reads
    ids: Tensor  # [B]  what stands in that column
    positions: Tensor  # [B]  place in its own sequence of what stands there
    log: Tensor  # [R,B]  what `ids` were after each of the last R passes: after pass i in row i % R
    num_passes: Tensor  # [1]


Empty = Callable[..., Tensor]
"""`empty(name, shape, like, dtype=None)`: an op's only source of memory; not initialized. Where it answers None
(`autograd`), PyTorch chooses the memory, and may differentiate the op.
"""


def autograd(name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Any:
    """The `Empty` of training: None, so that PyTorch keeps what the backward pass needs."""
    return None


def held(value: Tensor, out: Tensor | None) -> Tensor:
    """A value in the memory that `empty` gave, or where it is."""
    return value if out is None else out.copy_(value)


def fresh(name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The plainest `Empty`: a new tensor for whoever asks."""
    return like.new_empty(shape, dtype=dtype)
