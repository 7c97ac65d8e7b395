"""Staging: the integers of many tensors reach the device in one copy, at the same addresses each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from eet_lab.memory.lifetimes import aligned
from eet_lab.models.decoder import tensors

Sent = TypeVar("Sent", bound=tuple)
ALIGNED_NUMBERS = 16
"""Numbers: tensors begin at multiples of 128 bytes."""


PAGEABLE_BYTES = 65_536
"""What the driver takes in before a copy from memory that is not pinned returns; for more it waits for the device."""


class Staging:
    """A buffer of int64 on the device, which grows when more comes, and never shrinks; and tensors of other types."""

    def __init__(self, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=torch.long, device=device)
        self._others: dict[int, Tensor] = {}

    def receive(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors on the device, contiguous; they are overwritten by what comes next."""
        sizes = [aligned(part.numel(), ALIGNED_NUMBERS) for part in parts]
        pinned = self._data.is_cuda and sum(sizes) * self._data.itemsize > PAGEABLE_BYTES
        sent = torch.empty(sum(sizes), dtype=torch.long, pin_memory=pinned)
        room, ends = sent.numpy(), accumulate(sizes)  # numpy copies what is small in a tenth of PyTorch's time
        for part, end, size in zip(parts, ends, sizes, strict=True):
            begin = end - size
            room[begin : begin + part.numel()] = part.numpy().ravel()
        self.hold(len(sent))
        # Not waited for: the driver has a copy of what is sent, or PyTorch keeps the pinned memory until it is done.
        arrived = self._data[: len(sent)].copy_(sent, non_blocking=True).split(sizes)
        return [place[: part.numel()].view(part.shape) for part, place in zip(parts, arrived, strict=True)]

    def receive_other(self, number: int, part: Tensor) -> Tensor:
        """A tensor of floating-point numbers, in the place of the one before it with its number, if it is alike."""
        there = self._others.get(number)
        if there is None or there.shape != part.shape or there.dtype != part.dtype:
            there = self._others[number] = torch.empty_like(part, device=self.device)
        return there.copy_(part, non_blocking=True)

    def hold(self, num_numbers: int) -> None:
        """Room for so many."""
        if num_numbers > len(self._data):
            self._data = self._data.new_empty(0)  # free first
            self._data = self._data.new_empty(num_numbers)

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def address(self) -> int:
        """Where the numbers lie: another place once it has grown."""
        return self._data.data_ptr()

    @property
    def held_bytes(self) -> int:
        return sum(part.nbytes for part in (self._data, *self._others.values()))

    def close(self) -> None:
        """Give the memory back."""
        self._data = self._data.new_empty(0)
        self._others.clear()


class Returned:
    """A few numbers on their way to the host: who asks for them waits for them, and for nothing that came after."""

    def __init__(self, tensor: Tensor) -> None:
        self._numbers, self._event = tensor, None
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers, self._event = pinned.copy_(tensor, non_blocking=True), torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def numbers(self) -> Any:
        """They, in lists."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


def sent(batch: Sent, staging: Staging) -> Sent:
    """The same pass, or batch, or whatever holds such, on the device."""
    parts = tensors(batch)
    arrived = iter(staging.receive([part for part in parts if not part.is_floating_point()]))
    others = iter([staging.receive_other(i, part) for i, part in enumerate(parts) if part.is_floating_point()])
    return _replaced(batch, arrived, others)


def _replaced(part: Any, arrived: Iterator[Tensor], others: Iterator[Tensor]) -> Any:
    """Each tensor by the next one of its kind. Within `sent`, a function that calls itself would be a cycle."""
    if isinstance(part, Tensor):
        return next(others if part.is_floating_point() else arrived)
    return type(part)(*(_replaced(each, arrived, others) for each in part)) if hasattr(part, "_fields") else part
