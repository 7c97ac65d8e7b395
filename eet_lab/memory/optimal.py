"""A planner that looks for the smallest arena there is, for as long as it may."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from eet_lab.errors import SetupError
from eet_lab.memory.lifetimes import Lifetime, Plan
from eet_lab.memory.planners import greedy_by_size

TIME_LIMIT_S = 2.0


class Solution(NamedTuple):
    """The best plan that was found; `proven`: no arena can be smaller."""

    plan: Plan
    proven: bool


def optimal(lifetimes: Sequence[Lifetime]) -> Plan:
    """The smallest arena that can be found in two seconds; never larger than that of `greedy_by_size`."""
    return solve(lifetimes).plan


def solve(lifetimes: Sequence[Lifetime], time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """Pack rectangles (lifetime x bytes) into a strip as low as possible, with the constraint solver CP-SAT.

    It starts from `greedy_by_size`, and is not asked where that reaches the lower bound already.
    """
    start = greedy_by_size(lifetimes)
    if start.end == start.lower_bound_bytes:
        return Solution(start, True)
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SetupError(
            'the planner "optimal" needs the package ortools, which is not installed. Install the extra: '
            "pip install 'eet-lab[optimal]'"
        ) from error
    unit = math.gcd(*(life.num_bytes for life in lifetimes))
    model = cp_model.CpModel()
    height = model.new_int_var(start.lower_bound_bytes // unit, start.end // unit, "height")
    model.add_hint(height, start.end // unit)
    spans, bytes_, bottoms = [], [], []
    for life, offset in zip(lifetimes, start.offsets, strict=True):
        size = life.num_bytes // unit
        bottom = model.new_int_var(0, start.end // unit - size, "")
        model.add_hint(bottom, offset // unit)
        model.add(bottom + size <= height)
        spans.append(model.new_fixed_size_interval_var(life.first, life.last + 1 - life.first, ""))
        bytes_.append(model.new_fixed_size_interval_var(bottom, size, ""))
        bottoms.append(bottom)
    model.add_no_overlap_2d(spans, bytes_)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # not even the hint was read in time
        return Solution(start, False)
    offsets = tuple(solver.value(bottom) * unit for bottom in bottoms)
    return Solution(Plan(tuple(lifetimes), offsets), status == cp_model.OPTIMAL)
