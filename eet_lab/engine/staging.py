"""Staging: the integers of many tensors reach the device in one copy, at the same addresses each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from eet_lab.models.decoder import tensors
from eet_lab.ops.types import Batch
from eet_lab.parts.passes import Pass

Sent = TypeVar("Sent", Pass, Batch)
ALIGNED = 16
"""Numbers: tensors begin at multiples of 128 bytes."""


MOST_PAGEABLE = 8192
"""Numbers that the driver takes in before a copy returns: 64 KiB."""


def padded(num_numbers: int) -> int:
    """The room that so many take."""
    return -(-num_numbers // ALIGNED) * ALIGNED


class Staging:
    """A buffer of int64 on the device. It grows when more comes, and never shrinks."""

    def __init__(self, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=torch.long, device=device)

    def receive(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors on the device, contiguous; they are overwritten by what comes next."""
        sizes = [padded(part.numel()) for part in parts]
        # For more than that the driver would wait until all before the copy is done, unless the memory is pinned.
        pinned = self._data.is_cuda and sum(sizes) > MOST_PAGEABLE
        sent = torch.zeros(sum(sizes), dtype=torch.long, pin_memory=pinned)
        for part, place in zip(parts, sent.split(sizes), strict=True):
            place[: part.numel()].view(part.shape).copy_(part)
        self.hold(len(sent))
        # Not waited for: the driver has a copy of what is sent, or PyTorch keeps the pinned memory until it is done.
        arrived = self._data[: len(sent)].copy_(sent, non_blocking=True).split(sizes)
        return [place[: part.numel()].view(part.shape) for part, place in zip(parts, arrived, strict=True)]

    def hold(self, num_numbers: int) -> None:
        """Room for so many."""
        if num_numbers > len(self._data):
            self._data = self._data.new_empty(0)  # free first
            self._data = self._data.new_empty(num_numbers)

    @property
    def device(self) -> torch.device:
        return self._data.device

    def close(self) -> None:
        """Give the buffer back."""
        self._data = self._data.new_empty(0)


def sent(batch: Sent, staging: Staging) -> Sent:
    """The same pass, or batch, on the device."""
    arrived = iter(staging.receive([part for part in tensors(batch) if not part.is_floating_point()]))

    def there(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(staging.device, non_blocking=True) if part.is_floating_point() else next(arrived)
        return type(part)(*map(there, part)) if hasattr(part, "_fields") else part

    return there(batch)
