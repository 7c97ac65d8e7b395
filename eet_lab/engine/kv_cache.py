"""How one layer's past keys and values are kept. B rows, G KV heads, K columns, D head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from eet_lab.ops.types import Step


class GrowingKV:
    """The baseline: lengthened by concatenation, so each step copies all that was there."""

    def __init__(self, num_heads: int, head_dim: int, num_rows: int, capacity: int, like: Tensor) -> None:
        self.num_heads, self.head_dim = num_heads, head_dim
        self.keys = self.values = like.new_empty(num_rows, num_heads, 0, head_dim)

    def room(self, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values [B,G,K,D] with K = step.extent; new columns are zero until the attention op writes them."""
        self.keys, self.values = (self._lengthened(old, step.extent) for old in (self.keys, self.values))
        return self.keys, self.values

    @staticmethod
    def _lengthened(old: Tensor, extent: int) -> Tensor:
        return torch.cat((old, old.new_zeros(*old.shape[:2], extent - old.shape[2], old.shape[3])), 2)

    def clear(self) -> None:
        """Forget everything, for a new batch of the same shape."""
        self.keys = self.values = self.keys[:, :, :0].clone()

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def growth_bytes(self) -> int:
        """Bytes of the copy that stands beside the old keys or values while the layer grows."""
        return self.num_bytes // 2


class StaticKV:
    """Allocated once at the run's full length; a step writes its columns in place."""

    def __init__(self, num_heads: int, head_dim: int, num_rows: int, capacity: int, like: Tensor) -> None:
        self.num_heads, self.head_dim = num_heads, head_dim
        # Zeros, since a dense mask multiplies what it hides by 0, and 0 * NaN is NaN.
        self.keys, self.values = (like.new_zeros(num_rows, num_heads, capacity, head_dim) for _ in range(2))

    def room(self, step: Step) -> tuple[Tensor, Tensor]:
        """Views of the columns [0, step.extent)."""
        return self.keys[:, :, : step.extent], self.values[:, :, : step.extent]

    def clear(self) -> None:
        """Zeros again: a NaN of an earlier batch must not reach the next one through the mask."""
        self.keys.zero_()
        self.values.zero_()

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def growth_bytes(self) -> int:
        return 0
