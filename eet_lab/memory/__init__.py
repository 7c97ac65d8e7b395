"""Lifetimes of tensors, planners that turn them into offsets, pools that serve many requests. No torch in here."""

from eet_lab.memory.choices import POOLS, RELEASES
from eet_lab.memory.lifetimes import Chunk, Lifetime, Plan, live_bytes
from eet_lab.memory.planners import PLANNERS, Planner
from eet_lab.memory.pools import ArenaPool, DriverCalls, Pool

__all__ = [
    "PLANNERS",
    "POOLS",
    "RELEASES",
    "ArenaPool",
    "Chunk",
    "DriverCalls",
    "Lifetime",
    "Plan",
    "Planner",
    "Pool",
    "live_bytes",
]
