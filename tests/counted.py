"""Counts what PyTorch holds on the CPU, which has no counters of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(given: Any) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results. PyTorch's own `tree_leaves` would take most of the time."""
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, (list, tuple)):
        return [tensor for each in given if each is not None for tensor in tensors_in(each)]
    return []


class Counted(TorchDispatchMode):
    """While it is entered: bytes of all storages that operators made and that are alive, and the most at once.

    What an operator takes for itself and gives back before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0  # bytes alive, and of storages that are gone since the last look
        self.peak_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps each call for its compiler, which takes longer than the count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        made = [tensor for tensor in tensors_in(result) if not tensor.is_meta]
        given = {self._key(tensor) for tensor in tensors_in((args, *kwargs.values()))} if made else set()
        for leaf in made:
            if self._key(leaf) not in given:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._at_most += storage.nbytes()
        if self._at_most > self.peak_bytes:  # to look at all storages after every operator would take most of the time
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes alive now."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._at_most = sum(num_bytes for _, num_bytes in self._alive.values())
        return self._at_most

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata
