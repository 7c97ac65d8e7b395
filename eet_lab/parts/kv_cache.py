"""How all layers' past keys and values are kept. L layers, B rows, G KV heads, K columns, D head dim, P pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from eet_lab.ops.types import KV, Batch
from eet_lab.scheduling import Ledger, Slab


class KVCache(ABC):
    """A cache is opened for a batch, and asked for a layer's keys and values in each pass.

    Opened again, it uses the memory that it holds if the new batch fits.
    """

    block_table: Tensor | None = None
    """[B, blocks] int32 where keys and values lie in pages: the page that holds columns page*i .. of a row."""

    generation = 0
    """Grows when `open` had to move, and addresses are void that a captured graph may hold."""

    serves_joins: ClassVar[bool] = True
    """Whether a request may join while others run: what these have stays where it is."""

    ledger: Ledger
    """Which columns are whose, since it was opened: what a scheduler asks."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor) -> None:
        self.num_layers, self.num_heads, self.head_dim, self.like = num_layers, num_heads, head_dim, like
        self._kept: Sequence[int] = ()

    @property
    def kind(self) -> str:
        """How keys and values lie, in a word or a few: "growing", "static", "pages"."""
        return type(self).__name__.removesuffix("KV").lower()

    def check_room(self, num_pad: Sequence[int], ends: Sequence[int]) -> None:
        """PromptError where not every row of such a batch could fill its columns up to `ends` at the same time."""
        return  # what is allocated for a batch holds it

    def open(self, num_pad: Sequence[int], capacity: int, ends: Sequence[int] | None = None) -> None:
        """Forget everything, for a batch whose rows have so many pads, and at most `capacity` columns.

        Row b comes to column `ends[b]` at most; None: to the last one.
        """
        self._kept = ()
        self.ledger = Slab(len(num_pad), capacity)
        self._open(num_pad, capacity, ends or [capacity] * len(num_pad))

    def mirror(self) -> None:
        """Copy the ledger's changes to the device, before a step is launched. It is never captured."""
        return  # a rectangle lies where it lies

    @abstractmethod
    def layer(self, number: int, batch: Batch) -> KV:
        """Where a layer's attention writes the columns of a pass, and reads [0, batch.max_kv). It may be captured.

        A rectangle is that of the `batch.num_rows` rows of the pass, which may be the first ones alone.
        """

    @abstractmethod
    def _open(self, num_pad: Sequence[int], capacity: int, ends: Sequence[int]) -> None: ...

    def reset_prefix_cache(self) -> None:
        """Forget the tokens that no request has any more, and what was counted of them."""
        return  # it keeps none

    @property
    def prefix_cache_queries(self) -> int:
        """Tokens of requests that got a slot, since the prefix cache was reset; 0 where there is none."""
        return 0

    @property
    def prefix_cache_hits(self) -> int:
        """Those of them whose keys and values were there already, from requests before."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    @property
    def column_bytes(self) -> int:
        """Bytes of one token: keys and values of all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.like.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes held for keys and values."""
        return 0

    def keep(self, num_columns: Sequence[int]) -> None:
        """How many columns of each row stand for a token of its prompt or of its answer by now."""
        self._kept = tuple(num_columns)

    @property
    def used_bytes(self) -> int:
        """Bytes of them that stand for a token: neither pads, nor columns to come, nor what follows a row's end."""
        return self.column_bytes * sum(self._kept) - self.shared_bytes if self.num_bytes else 0

    @property
    def shared_bytes(self) -> int:
        """Bytes saved at the moment, since rows that begin with the same tokens have these only once."""
        return 0

    @property
    def copied_bytes(self) -> int:
        """Bytes copied since the cache was opened, only to make room."""
        return 0

    @property
    def growth_bytes(self) -> int:
        """Bytes of the copy that stands beside a layer's old keys or values while they grow."""
        return 0


class GrowingKV(KVCache):
    """The baseline: lengthened by concatenation, so each step copies all that was there."""

    serves_joins = False

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor) -> None:
        super().__init__(num_layers, num_heads, head_dim, like)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._copied_bytes = 0

    def _open(self, num_pad: Sequence[int], capacity: int, ends: Sequence[int]) -> None:
        none = self.like.new_empty(len(num_pad), self.num_heads, 0, self.head_dim)
        self.keys, self.values = [none] * self.num_layers, [none] * self.num_layers
        self._copied_bytes = 0

    def layer(self, number: int, batch: Batch) -> KV:
        """[B,G,K,D] with K = batch.max_kv; new columns are zero until the attention op writes them."""
        for parts in (self.keys, self.values):
            if parts[number].shape[2] < batch.max_kv:  # it may be more, once the longest row has ended
                parts[number] = self._lengthened(parts[number], batch.max_kv)
        return self.keys[number][:, :, : batch.max_kv], self.values[number][:, :, : batch.max_kv]

    def _lengthened(self, old: Tensor, length: int) -> Tensor:
        self._copied_bytes += old.numel() * old.element_size()
        return torch.cat((old, old.new_zeros(*old.shape[:2], length - old.shape[2], old.shape[3])), 2)

    def close(self) -> None:
        self.keys, self.values = [], []

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for parts in (self.keys, self.values) for part in parts)

    @property
    def copied_bytes(self) -> int:
        return self._copied_bytes

    @property
    def growth_bytes(self) -> int:
        return max((part.numel() * part.element_size() for part in self.keys), default=0)


class StaticKV(KVCache):
    """One slab for all layers, allocated at the batch's full length; a step writes its columns in place."""

    keys: Tensor  # [L,B,G,K,D]
    values: Tensor

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor) -> None:
        super().__init__(num_layers, num_heads, head_dim, like)
        self._slab: Tensor | None = None  # [2,N]

    def _open(self, num_pad: Sequence[int], capacity: int, ends: Sequence[int]) -> None:
        shape = (self.num_layers, len(num_pad), self.num_heads, capacity, self.head_dim)
        needed = torch.Size(shape).numel()
        if self._slab is None or self._slab.shape[1] < needed:
            self.close()  # free first: the old and the new together might not fit
            self._slab = self.like.new_empty(2, needed)
            self.generation += 1
        # Zeros, since a dense mask multiplies what it hides by 0, and 0 * NaN is NaN.
        self.keys, self.values = self._slab[:, :needed].zero_().view(2, *shape)

    def layer(self, number: int, batch: Batch) -> KV:
        """Views of the pass's rows, and of their columns [0, batch.max_kv)."""
        B, K = batch.num_rows, batch.max_kv
        return self.keys[number, :B, :, :K], self.values[number, :B, :, :K]

    def close(self) -> None:
        self._slab = None
        self.keys = self.values = self.like.new_empty(0)

    @property
    def num_bytes(self) -> int:
        return 0 if (slab := self._slab) is None else slab.numel() * slab.element_size()
