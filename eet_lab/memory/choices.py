"""The pools that a user can choose from, by name."""

from __future__ import annotations

from typing import Protocol

from eet_lab.memory.buffers import FirstFitPool
from eet_lab.memory.chunks import ChunkedPool
from eet_lab.memory.optimal import optimal
from eet_lab.memory.planners import PLANNERS, Planner
from eet_lab.memory.pools import ArenaPool, Pool


class PoolFactory(Protocol):
    def __call__(self, release: str = "immediate") -> Pool:
        """A fresh pool; `release` is one of RELEASES, and says when chunks are given back where a pool has chunks."""


def _arena(planner: Planner) -> PoolFactory:
    return lambda release="immediate": ArenaPool(planner)


POOLS: dict[str, PoolFactory] = {name: _arena(planner) for name, planner in PLANNERS.items()} | {
    "optimal": _arena(optimal),
    "chunked": lambda release="immediate": ChunkedPool("arrival", release),
    "chunked_ascending": lambda release="immediate": ChunkedPool("ascending", release),
    "eet": lambda release="immediate": FirstFitPool(repaired=False),
    "eet_repaired": lambda release="immediate": FirstFitPool(repaired=True),
}
