"""Lifetimes of tensors, and planners that turn them into offsets. No torch in here."""

from eet_lab.memory.lifetimes import Lifetime, Plan, live_bytes
from eet_lab.memory.planners import PLANNERS, Planner

__all__ = ["PLANNERS", "Lifetime", "Plan", "Planner", "live_bytes"]
