"""Lifetimes of the tensors of a pass, traced while it runs on meta tensors: no GPU and no arithmetic needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from eet_lab.memory.lifetimes import Lifetime, aligned


class Rehearsal(NamedTuple):
    """A pass that can be run on meta tensors: equal keys make equal requests."""

    key: tuple
    run: Callable[[], None]


class Trace:
    """Gives out meta tensors, and watches when each dies."""

    def __init__(self) -> None:
        self._lifetimes: list[Lifetime | None] = []
        self._alive: list[tuple[int, str, int, StorageWeakRef]] = []

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        self._bury()
        out = like.new_empty(shape, dtype=dtype)
        num_bytes = aligned(out.numel() * out.element_size())
        self._alive.append((len(self._lifetimes), name, num_bytes, StorageWeakRef(out.untyped_storage())))
        self._lifetimes.append(None)
        return out

    def finish(self) -> tuple[Lifetime, ...]:
        """All lifetimes in order of first use; what is still alive lives to the end."""
        self._bury()
        last = len(self._lifetimes) - 1
        for first, name, num_bytes, _ in self._alive:
            self._lifetimes[first] = Lifetime(name, num_bytes, first, last)
        self._alive = []
        return tuple(life for life in self._lifetimes if life is not None)

    def _bury(self) -> None:
        last, alive = len(self._lifetimes) - 1, []
        for entry in self._alive:
            first, name, num_bytes, storage = entry
            if storage.expired():
                self._lifetimes[first] = Lifetime(name, num_bytes, first, last)
            else:
                alive.append(entry)
        self._alive = alive
