"""Counts what PyTorch holds on the CPU, which has no counters of its own."""

from __future__ import annotations

from functools import cache
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


@cache
def writes(function: torch._ops.OpOverload) -> bool:
    """Whether all that an operator gives back is what it was given to write to, such as `out`."""
    results = function._schema.returns
    return all(result.alias_info is not None and result.alias_info.is_write for result in results)


@cache
def is_new(function: torch._ops.OpOverload) -> bool:
    """Whether nothing that it gives back is of what it was given: no view, and no tensor that may stay as it is."""
    unsaid = torch.ops.aten._unsafe_view.default
    return function is not unsaid and all(result.alias_info is None for result in function._schema.returns)


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
        made = [] if writes(function) else [tensor for tensor in tensors_in(result) if not tensor.is_meta]
        given = set()
        if made and not is_new(function):
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, *kwargs.values()))}
        for leaf in made:
            storage = leaf.untyped_storage()
            if storage._cdata not in given:
                num_bytes = storage.nbytes()
                self._alive[storage._cdata] = StorageWeakRef(storage), num_bytes
                self._at_most += num_bytes
        if self._at_most > self.peak_bytes:  # to look at all storages after every operator would take most of the time
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result

    @property
    def num_bytes(self) -> int:
        """Bytes alive now."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._at_most = sum(num_bytes for _, num_bytes in self._alive.values())
        return self._at_most
