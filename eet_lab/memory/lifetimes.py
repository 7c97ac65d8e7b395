"""When a tensor lives, and where a plan puts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from eet_lab.errors import PlanError

ALIGNMENT = 256
"""Bytes; what CUDA's own allocator guarantees, and what 16-byte loads and tensor cores ask for."""


@dataclass(frozen=True)
class Lifetime:
    """One tensor of a pass: made at request `first`, last alive at request `last` (both inclusive).

    `op` is the op that asked for it ("attention", "norm_linear"), where that is known.
    """

    name: str
    num_bytes: int
    first: int
    last: int
    op: str = ""

    def __post_init__(self) -> None:
        numbers = {"num_bytes": self.num_bytes, "first": self.first, "last": self.last}
        if wrong := {name: n for name, n in numbers.items() if not isinstance(n, int) or n < 0}:
            told = ", ".join(f"{name} is {value!r}" for name, value in wrong.items())
            raise PlanError(f"Of the lifetime {self.name!r}, {told}: give whole numbers from 0 on.")
        if self.last < self.first:
            raise PlanError(
                f"The lifetime {self.name!r} begins at request {self.first} and ends at {self.last}: it cannot end "
                "before it begins."
            )

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last

    def shifted(self, by: int) -> Lifetime:
        """The same tensor, `by` requests later."""
        return Lifetime(self.name, self.num_bytes, self.first + by, self.last + by, self.op)


@dataclass(frozen=True)
class Chunk:
    """One allocation of the driver's, at `start` of a plan's address space. Each allocation has an id of its own."""

    id: int
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True)
class Plan:
    """Where each lifetime lies: `offsets[i]` belongs to `lifetimes[i]`, in bytes of one address space.

    `chunks` are the allocations behind it, disjoint and in order of `start`; what lies between them costs nothing.
    Left out, they are one arena that ends where the highest lifetime does.
    """

    lifetimes: tuple[Lifetime, ...]
    offsets: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()

    def __post_init__(self) -> None:
        if not self.chunks and self.end:
            object.__setattr__(self, "chunks", (Chunk(0, 0, self.end),))

    @cached_property
    def end(self) -> int:
        """The address behind the highest lifetime that has any bytes."""
        placed = zip(self.offsets, self.lifetimes, strict=True)
        return max((offset + life.num_bytes for offset, life in placed if life.num_bytes), default=0)

    @cached_property
    def footprint_bytes(self) -> int:
        """What is allocated; of one arena that was made for this plan, its `end`."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The most bytes that are alive at once: no plan can do with less."""
        return max(live_bytes(self.lifetimes), default=0)


def aligned(number: int, alignment: int = ALIGNMENT) -> int:
    """A number, of bytes if nothing else is said, rounded up to a multiple of the alignment."""
    return -(-number // alignment) * alignment


def one_after_the_other(passes: Iterable[Sequence[Lifetime]]) -> tuple[Lifetime, ...]:
    """A request's passes as one trace: nothing of a pass is alive in the next. Their lifetimes stay in order."""
    whole: list[Lifetime] = []
    for trace in passes:
        begin = len(whole)
        whole += (life.shifted(begin) for life in trace)
    return tuple(whole)


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
