"""The pools that a user can choose from, by name."""

from __future__ import annotations

from typing import Protocol

from eet_lab.memory.planners import PLANNERS, Planner
from eet_lab.memory.pools import ArenaPool, Pool

RELEASES = ("immediate", "idle", "never")
"""When a chunk that a request left unused is given back; a pool of one arena or of EET's buffers has no such choice."""


class PoolFactory(Protocol):
    def __call__(self, release: str = "immediate") -> Pool:
        """A fresh pool; `release` is one of RELEASES."""


def _arena(planner: Planner) -> PoolFactory:
    return lambda release="immediate": ArenaPool(planner)


POOLS: dict[str, PoolFactory] = {name: _arena(planner) for name, planner in PLANNERS.items()}
