"""When a tensor lives, and where a plan puts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 256
"""Bytes; what CUDA's own allocator guarantees, and what 16-byte loads and tensor cores ask for."""


@dataclass(frozen=True)
class Lifetime:
    """One tensor of a pass: made at request `first`, last alive at request `last` (both inclusive)."""

    name: str
    num_bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Plan:
    """Where each lifetime lies in an arena: `offsets[i]` belongs to `lifetimes[i]`, in bytes."""

    lifetimes: tuple[Lifetime, ...]
    offsets: tuple[int, ...]

    @cached_property
    def footprint_bytes(self) -> int:
        return max((o + life.num_bytes for o, life in zip(self.offsets, self.lifetimes, strict=True)), default=0)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The most bytes that are alive at once: no plan can do with less."""
        return max(live_bytes(self.lifetimes), default=0)


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def live_bytes(lifetimes: Sequence[Lifetime]) -> list[int]:
    """Bytes alive at each request of the pass."""
    change = [0] * (max((life.last for life in lifetimes), default=-1) + 2)
    for life in lifetimes:
        change[life.first] += life.num_bytes
        change[life.last + 1] -= life.num_bytes
    total, curve = 0, []
    for step in change[:-1]:
        total += step
        curve.append(total)
    return curve
