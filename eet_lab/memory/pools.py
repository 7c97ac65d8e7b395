"""Pools: what is held from the driver while requests of different shapes come one after the other.

A planner sees one request; a pool remembers. It places each request in the chunks that it holds, gets more from the
driver where they do not suffice, and gives back what its policy says. Nothing here touches a device: an engine keeps
one tensor for each chunk id.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from eet_lab.errors import PlanError
from eet_lab.memory.lifetimes import Chunk, Lifetime, Plan, aligned
from eet_lab.memory.planners import Planner, greedy_by_size

POLICIES = ("grow", "fit")


@dataclass(frozen=True)
class DriverCalls:
    """How often the driver was asked, and for how many bytes; `later - earlier` is what came between."""

    allocations: int = 0
    frees: int = 0
    allocated_bytes: int = 0
    freed_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.allocated_bytes - self.freed_bytes

    def __add__(self, other: DriverCalls) -> DriverCalls:
        return DriverCalls(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: DriverCalls) -> DriverCalls:
        return DriverCalls(*map(operator.sub, astuple(self), astuple(other)))


class Pool(Protocol):
    """Places one request after the other."""

    def place(self, lifetimes: Sequence[Lifetime]) -> Plan:
        """A plan for one request in what is held after it; the plan before it is void. PlanError if that cannot be."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What is held now, in order of `start`. The id of a chunk that was given back is never used again."""

    @property
    def calls(self) -> DriverCalls:
        """What the driver was asked for since the pool was made."""


class LedgerPool:
    """What pools have in common: the chunks that they hold, in order of arrival, and the calls that it took."""

    def __init__(self) -> None:
        self.held: list[Chunk] = []
        self.calls = DriverCalls()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks in order of their addresses."""
        return tuple(sorted(self.held, key=lambda chunk: chunk.start))

    def allocate(self, num_bytes: int) -> Chunk:
        """A new chunk, at the lowest address where it touches no other."""
        start = 0
        for other in self.chunks:
            if start + num_bytes <= other.start:
                break
            start = aligned(other.end)
        chunk = Chunk(self.calls.allocations, start, num_bytes)
        self.held.append(chunk)
        self.calls += DriverCalls(allocations=1, allocated_bytes=num_bytes)
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Give one back."""
        self.held.remove(chunk)
        self.calls += DriverCalls(frees=1, freed_bytes=chunk.num_bytes)


class ArenaPool(LedgerPool):
    """One arena, filled by a planner.

    `policy` "grow" keeps the arena until a request needs a larger one; "fit" frees it and allocates what is needed
    anew for each request, as the baseline in TurboTransformers' paper does.
    """

    def __init__(self, planner: Planner = greedy_by_size, policy: str = "grow") -> None:
        if policy not in POLICIES:
            raise PlanError(f"policy is {policy!r}, but it must be one of {', '.join(POLICIES)}.")
        super().__init__()
        self._planner, self._policy = planner, policy

    def place(self, lifetimes: Sequence[Lifetime]) -> Plan:
        plan = self._planner(lifetimes)
        if self._policy == "fit" or plan.end > self.calls.held_bytes:
            for chunk in self.chunks:  # before the new one: both together might not fit
                self.free(chunk)
            if plan.end:
                self.allocate(plan.end)
        return Plan(plan.lifetimes, plan.offsets, self.chunks)
