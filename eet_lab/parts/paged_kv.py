"""A KV cache in pages, which lie anywhere. L layers, B rows, G KV heads, K columns, D head dim, P pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eet_lab.errors import OutOfMemory, PromptError
from eet_lab.monitor import free_bytes_of
from eet_lab.ops.types import KV, Batch
from eet_lab.parts.kv_cache import KVCache
from eet_lab.parts.staging import PAGEABLE_BYTES
from eet_lab.scheduling import HIDDEN, PageLedger, SharedPageLedger
from eet_lab.words import counted, sized

PAGE = 16
"""Columns of a page: what decode attention reads at a time."""


class Pages(KVCache):
    """A pool of pages, and a table of which of them hold a row's columns: a row takes a page when it comes to it.

    All layers share the table, since they have the same columns: page p of a layer is its own, but holds the same
    tokens in each. A row grows by a page at a time, wherever one is free, so nothing is ever copied. Pads take no page.

    The pool is allocated when a batch is opened, large enough for all its columns, since captured steps hold on to its
    address. So pages of columns that are never reached stay free, but they are held.
    """

    block_table: Tensor  # [B,blocks] int32
    keys: Tensor  # [L,P,G,page,D]
    values: Tensor
    ledger: PageLedger

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, like: Tensor, page: int, num_pages: int | None = None
    ) -> None:
        super().__init__(num_layers, num_heads, head_dim, like)
        self.page, self._limit = page, num_pages
        self._entries: Tensor
        self._host_entries: Tensor
        self.close()

    def check_room(self, num_pad: Sequence[int], ends: Sequence[int]) -> None:
        # The last column is never read, and takes no page of its own.
        needed = sum(self._num_pages(pad, end - 1) for pad, end in zip(num_pad, ends, strict=True))
        if self._limit is not None and needed >= self._limit:
            rows, pages = counted(len(num_pad), "row"), f"{needed:,} pages of {self.page}"
            raise PromptError(
                f"{rows} of {max(ends):,} columns may need {pages}, but there are {self._limit - 1:,}. Allow more "
                "pages, ask for less, or add continuous_batching: requests then wait for pages."
            )

    def _open(self, num_pad: Sequence[int], capacity: int, ends: Sequence[int]) -> None:
        num_rows, num_blocks = len(num_pad), -(-capacity // self.page)
        needed = sum(self._num_pages(pad, end) for pad, end in zip(num_pad, ends, strict=True))
        self._hold(self._limit or 1 + needed, num_rows * num_blocks)
        self.keys.zero_()  # a dense mask multiplies what it hides by 0, and 0 * NaN is NaN
        self.values.zero_()
        self.ledger = self._new_ledger(self.num_pages, num_rows)  # what the batch before had is given back
        self._on_host = self._host_entries[: num_rows * num_blocks].fill_(HIDDEN).view(num_rows, num_blocks)
        self.block_table = self._entries[: num_rows * num_blocks].view(num_rows, num_blocks)
        self.block_table.copy_(self._on_host)

    def _num_pages(self, pad: int, end: int) -> int:
        """Of a row whose columns begin with pads, up to column `end`."""
        return -(-end // self.page) - pad // self.page

    def _hold(self, num_pages: int, num_entries: int) -> None:
        """At least so many pages, and entries of the table, at the same addresses as before if there are enough.

        OutOfMemory for a limit of more pages than there is memory for.
        """
        if num_pages > self.num_pages:
            self.keys = self.values = self.like.new_empty(0)  # free first
            needed = num_pages * self.page * self.column_bytes
            if num_pages == self._limit and needed > (free := free_bytes_of(self.like.device)):
                raise OutOfMemory(
                    f"pages is {num_pages - 1:,}, whose keys and values take {sized(needed)}, but {sized(free)} are "
                    "free. Ask for fewer (memory_reuse:pages), or leave pages out."
                )
            shape = (2, self.num_layers, num_pages, self.num_heads, self.page, self.head_dim)
            self.keys, self.values = self.like.new_empty(shape)
            self.generation += 1
        if num_entries > len(self._entries):
            self._entries = self.like.new_empty(num_entries, dtype=torch.int32)
            self.generation += 1
            self._host_entries = torch.empty(num_entries, dtype=torch.int32)

    def mirror(self) -> None:
        changes = self.ledger.take_changes()
        if not changes:
            return
        entries = self._on_host.numpy()
        for row in changes:
            pages, begin = self.ledger.table[row], self.ledger.skipped[row]
            entries[row] = HIDDEN
            entries[row, begin : begin + len(pages)] = pages
        # They may change when the call returns: the driver has taken them, or they are a copy that PyTorch keeps.
        is_large = self.block_table.is_cuda and self._on_host.nbytes > PAGEABLE_BYTES
        self.block_table.copy_(self._on_host.pin_memory() if is_large else self._on_host, non_blocking=True)

    def layer(self, number: int, batch: Batch) -> KV:
        """The layer's pages of keys and of values [P,G,page,D]; `block_table` tells which are whose."""
        return self.keys[number], self.values[number]

    def close(self) -> None:
        self.keys = self.values = self.like.new_empty(0)
        self._entries = self.block_table = self.like.new_empty(0, dtype=torch.int32)
        self._host_entries = self._on_host = torch.empty(0, dtype=torch.int32)
        self.ledger = self._new_ledger(2, 1)

    def _new_ledger(self, num_pages: int, num_rows: int) -> PageLedger:
        return PageLedger(num_pages, self.page, num_rows)

    @property
    def num_pages(self) -> int:
        """The pages of each layer, the hidden one among them."""
        return self.keys.shape[1] if self.keys.ndim > 1 else 0

    @property
    def num_free_pages(self) -> int:
        return self.ledger.free if self.num_pages else 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of the pages that rows have taken: those that are used, and the rest of each row's last page."""
        return (self.num_pages - 1 - self.num_free_pages) * self.page * self.column_bytes if self.num_pages else 0

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page * self.column_bytes


class SharedPages(Pages):
    """Pages with prefix caching: the table of several rows may name the same page, which none of them writes to."""

    ledger: SharedPageLedger

    def _new_ledger(self, num_pages: int, num_rows: int) -> SharedPageLedger:
        return SharedPageLedger(num_pages, self.page, num_rows)

    @property
    def kind(self) -> str:
        return "pages, shared by prefix"

    def mirror(self) -> None:
        for source, target in self.ledger.take_copies():  # before the pass, and behind those that wrote the source
            self.keys[:, target] = self.keys[:, source]
            self.values[:, target] = self.values[:, source]
        super().mirror()

    def reset_prefix_cache(self) -> None:
        self.ledger.reset()

    @property
    def prefix_cache_queries(self) -> int:
        return self.ledger.num_queries

    @property
    def prefix_cache_hits(self) -> int:
        return self.ledger.num_hits

    @property
    def shared_bytes(self) -> int:
        return self.ledger.num_shared * self.page * self.column_bytes


@dataclass(frozen=True)
class PagedKV:
    """A KV cache part: pages of `page` columns, as many as the batch could fill or `num_pages`, one of them hidden."""

    page: int = PAGE
    num_pages: int | None = None
    prefix_caching: bool = False  # whether requests that begin with the same tokens share the pages of these

    def __call__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor) -> Pages:
        kind = SharedPages if self.prefix_caching else Pages
        return kind(num_layers, num_heads, head_dim, like, self.page, self.num_pages)
