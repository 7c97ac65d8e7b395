"""A workload's requests, served by any pool: what is held after each, and how often the driver was asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

from eet_lab.errors import EETError, PlanError, first_line
from eet_lab.memory.buffers import FirstFitPool
from eet_lab.memory.choices import POOLS
from eet_lab.memory.chunks import ORDERS, RELEASES, ChunkedPool
from eet_lab.memory.lifetimes import Lifetime, Plan
from eet_lab.memory.pools import ArenaPool, DriverCalls, Pool
from eet_lab.memory.workloads import Request

TURBO_ALIGNMENT = 32
"""TurboTransformers rounds its chunks to 32 bytes, and tensors not at all."""


@dataclass(frozen=True)
class Served:
    """A request that was placed: its plan, whose chunks are all that is held after it, and the calls that it took."""

    length: int
    plan: Plan
    calls: DriverCalls


@dataclass(frozen=True)
class Replay:
    """What a pool did with a workload; `ended` tells why it did not serve all of it."""

    served: tuple[Served, ...]
    ended: str = ""

    @cached_property
    def footprint_bytes(self) -> tuple[int, ...]:
        """Held after each request."""
        return tuple(one.plan.footprint_bytes for one in self.served)

    @cached_property
    def lower_bound_bytes(self) -> tuple[int, ...]:
        """Alive at once in each request."""
        return tuple(one.plan.lower_bound_bytes for one in self.served)

    @cached_property
    def calls(self) -> DriverCalls:
        """All calls of the driver together."""
        return sum((one.calls for one in self.served), DriverCalls())

    @property
    def held_bytes(self) -> int:
        """Held in the end."""
        return self.calls.held_bytes

    @property
    def mean_footprint_bytes(self) -> float:
        return sum(self.footprint_bytes) / len(self.served)

    @property
    def new_bytes_per_request(self) -> float:
        return self.calls.allocated_bytes / len(self.served)


def replay(pool: Pool, workload: Iterable[Request]) -> Replay:
    """Serve one request after the other with a fresh pool, until one cannot be placed."""
    served, before = list[Served](), DriverCalls()
    for length, lifetimes in workload:
        try:
            plan = pool.place(lifetimes)
        except PlanError as error:
            return Replay(tuple(served), str(error))
        served.append(Served(length, plan, pool.calls - before))
        before = pool.calls
    return Replay(tuple(served))


def pools(workload: Sequence[Request]) -> dict[str, Callable[[], Pool]]:
    """What there is to compare on a workload, by name; each makes a fresh pool.

    "reserved" is an arena that is allocated for the longest request before the first one comes.
    """

    def reserved() -> Pool:
        pool = ArenaPool()
        pool.place(max(workload, key=lambda request: request.length).lifetimes)
        return pool

    chunked = {
        f"chunks, {order}, {release}": partial(ChunkedPool, order, release, alignment=TURBO_ALIGNMENT)
        for order in ORDERS
        for release in RELEASES
    }
    return {
        "arena, made anew": partial(ArenaPool, policy="fit"),
        "arena, grown": ArenaPool,
        "arena, reserved": reserved,
        **chunked,
        "EET": partial(FirstFitPool, repaired=False),
        "EET, repaired": FirstFitPool,
    }


def compare(workload: Sequence[Request]) -> dict[str, Replay]:
    """Every pool on the same workload."""
    return {name: replay(make(), workload) for name, make in pools(workload).items()}


@dataclass(frozen=True)
class Placed:
    """One request, placed by a fresh pool. `plan` is None where the pool cannot, and `why` says why not."""

    name: str
    plan: Plan | None
    calls: DriverCalls
    planning_ms: float
    why: str = ""


def side_by_side(lifetimes: Sequence[Lifetime], names: Iterable[str] = tuple(POOLS)) -> list[Placed]:
    """The same lifetimes, placed by a fresh pool of each name. Takes as long as the slowest of them."""
    return [_placed(name, lifetimes) for name in names]


def _placed(name: str, lifetimes: Sequence[Lifetime]) -> Placed:
    with suppress(EETError):
        POOLS[name]().place(lifetimes[:2])  # what only the first call of a process takes, such as a solver's import
    pool, begun = POOLS[name](), time.perf_counter()
    try:
        plan, why = pool.place(lifetimes), ""
    except EETError as error:  # a pool that ends here, or a solver that is not installed
        plan, why = None, first_line(error)
    return Placed(name, plan, pool.calls, (time.perf_counter() - begun) * 1e3, why)
