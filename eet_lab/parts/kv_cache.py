"""How all layers' past keys and values are kept. L layers, B rows, G KV heads, K columns, D head dim, P pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from eet_lab.ops.types import Step
from eet_lab.scheduling import Ledger, Slab


class LayerKV:
    """One layer of a cache, as the ops see it."""

    __slots__ = ("_cache", "_layer", "head_dim", "num_heads")

    def __init__(self, cache: KVCache, layer: int) -> None:
        self._cache, self._layer = cache, layer
        self.num_heads, self.head_dim = cache.num_heads, cache.head_dim

    @property
    def block_table(self) -> Tensor | None:
        return self._cache.block_table

    def room(self, step: Step) -> tuple[Tensor, Tensor]:
        return self._cache.room(self._layer, step)


class KVCache(ABC):
    """A cache is opened for a batch, told how far each step reaches, and asked by the layers for room.

    Opened again, it uses the memory that it holds if the new batch fits. Iterating it gives the layers.
    """

    block_table: Tensor | None = None
    """[B, blocks] int32 where keys and values lie in pages: the page that holds columns page*i .. of a row."""

    generation = 0
    """Grows when `open` had to move, and addresses are void that a captured graph may hold."""

    ledger: Ledger
    """Which columns are whose, since it was opened: what a scheduler asks."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor) -> None:
        self.num_layers, self.num_heads, self.head_dim, self.like = num_layers, num_heads, head_dim, like
        self._num_pad: Sequence[int] = ()
        self._kept: Sequence[int] = ()
        self._extent = 0

    def __iter__(self) -> Iterator[LayerKV]:
        return (LayerKV(self, layer) for layer in range(self.num_layers))

    def check_room(self, num_pad: Sequence[int], capacity: int) -> None:
        """PromptError where not every row of such a batch could fill its columns at the same time."""
        return  # what is allocated for a batch holds it

    def open(self, num_pad: Sequence[int], capacity: int) -> None:
        """Forget everything, for a batch whose rows have so many pads, and at most `capacity` columns."""
        self._num_pad, self._kept, self._extent = num_pad, (), 0
        self.ledger = Slab(len(num_pad), capacity)
        self._open(len(num_pad), capacity)

    def reach(self, extent: int) -> None:
        """Before a step is launched: columns [0, extent) of all rows will exist. Never part of what is captured."""
        self._extent = extent

    def mirror(self) -> None:
        """Before a step is launched: what the ledger changed reaches the device. Never part of what is captured."""
        return  # a rectangle lies where it lies

    @abstractmethod
    def room(self, layer: int, step: Step) -> tuple[Tensor, Tensor]:
        """A layer's keys and values for `step`, as `KVLayer.room` says."""

    @abstractmethod
    def _open(self, num_rows: int, capacity: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""

    @property
    def column_bytes(self) -> int:
        """Of one token: keys and values of all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.like.element_size()

    @property
    def num_bytes(self) -> int:
        """Bytes held for keys and values."""
        return 0

    def keep(self, num_columns: Sequence[int]) -> None:
        """How many columns of each row stand for a token of its prompt or of its answer, where a row may have ended."""
        self._kept = tuple(num_columns)

    @property
    def used_bytes(self) -> int:
        """Bytes of them that stand for a token: neither pads, nor columns to come, nor what follows a row's end.

        While a run goes on, rows are not known to have ended.
        """
        kept = self._kept or [max(self._extent - pad, 0) for pad in self._num_pad]
        return self.column_bytes * sum(kept) if self.num_bytes else 0

    @property
    def waste_bytes(self) -> int:
        """Bytes held for no token."""
        return self.num_bytes - self.used_bytes

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

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor) -> None:
        super().__init__(num_layers, num_heads, head_dim, like)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._copied_bytes = 0

    def _open(self, num_rows: int, capacity: int) -> None:
        none = self.like.new_empty(num_rows, self.num_heads, 0, self.head_dim)
        self.keys, self.values = [none] * self.num_layers, [none] * self.num_layers
        self._copied_bytes = 0

    def room(self, layer: int, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values [B,G,K,D] with K = step.extent; new columns are zero until the attention op writes them."""
        for parts in (self.keys, self.values):
            parts[layer] = self._lengthened(parts[layer], step.extent)
        return self.keys[layer], self.values[layer]

    def _lengthened(self, old: Tensor, extent: int) -> Tensor:
        self._copied_bytes += old.numel() * old.element_size()
        return torch.cat((old, old.new_zeros(*old.shape[:2], extent - old.shape[2], old.shape[3])), 2)

    def close(self) -> None:
        self.keys, self.values = [], []
        self._num_pad = ()

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

    def _open(self, num_rows: int, capacity: int) -> None:
        shape = (self.num_layers, num_rows, self.num_heads, capacity, self.head_dim)
        needed = torch.Size(shape).numel()
        if self._slab is None or self._slab.shape[1] < needed:
            self.close()  # free first: the old and the new together might not fit
            self._slab = self.like.new_empty(2, needed)
            self.generation += 1
        # Zeros, since a dense mask multiplies what it hides by 0, and 0 * NaN is NaN.
        self.keys, self.values = self._slab[:, :needed].zero_().view(2, *shape)

    def room(self, layer: int, step: Step) -> tuple[Tensor, Tensor]:
        """Views of the columns [0, step.extent)."""
        return self.keys[layer, :, :, : step.extent], self.values[layer, :, :, : step.extent]

    def close(self) -> None:
        self._slab = None
        self.keys = self.values = self.like.new_empty(0)

    @property
    def num_bytes(self) -> int:
        return 0 if (slab := self._slab) is None else slab.numel() * slab.element_size()
