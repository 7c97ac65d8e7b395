"""Lifetimes of tensors, planners that turn them into offsets, pools that serve many requests. No torch in here."""

from eet_lab.memory.buffers import FirstFitPool
from eet_lab.memory.choices import POOLS
from eet_lab.memory.chunks import RELEASES, ChunkedPool
from eet_lab.memory.lifetimes import Chunk, Lifetime, Plan, live_bytes, one_after_the_other
from eet_lab.memory.optimal import optimal
from eet_lab.memory.planners import PLANNERS, Planner
from eet_lab.memory.pools import ArenaPool, DriverCalls, Pool

__all__ = [
    "PLANNERS",
    "POOLS",
    "RELEASES",
    "ArenaPool",
    "Chunk",
    "ChunkedPool",
    "DriverCalls",
    "FirstFitPool",
    "Lifetime",
    "Plan",
    "Planner",
    "Pool",
    "live_bytes",
    "one_after_the_other",
    "optimal",
]
