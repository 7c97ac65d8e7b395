"""A planner that looks for the smallest arena there is, for as long as it may."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from eet_lab.errors import SetupError
from eet_lab.memory.lifetimes import Lifetime, Plan, aligned
from eet_lab.memory.planners import greedy_by_size
from eet_lab.paths import install_command

TIME_LIMIT_S = 2.0


class Solution(NamedTuple):
    """The best plan that was found; `proven`: no arena can be smaller."""

    plan: Plan
    proven: bool


def optimal(lifetimes: Sequence[Lifetime]) -> Plan:
    """The smallest arena that can be found in two seconds; never larger than that of `greedy_by_size`.

    SetupError where the solver is not installed (`missing`).
    """
    return solve(lifetimes).plan


def solve(lifetimes: Sequence[Lifetime], time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """The smallest arena that can be found in `time_limit_s` seconds, and whether there is none smaller.

    The lifetimes are rectangles, requests by bytes in whole ALIGNMENTs, that may be moved up and down; the constraint
    solver CP-SAT packs them as low as it can. It starts from `greedy_by_size`, and is not asked where that reaches the
    lower bound already.
    """
    cp_model, start = _solver(), greedy_by_size(lifetimes)
    if start.end == start.lower_bound_bytes:
        return Solution(start, True)
    found, proven = _packed(cp_model, start, time_limit_s)
    return Solution(found if found.end < start.end else start, proven)


def missing() -> str | None:
    """Why there can be no optimal plans here, and what to do; None where the solver is installed."""
    try:
        _solver()
    except SetupError as error:
        return str(error)
    return None


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise SetupError(
            'the planner "optimal" needs the package ortools, which is not installed. Choose another planner, or type: '
            + install_command("optimal")
        ) from error
    return cp_model


def _packed(cp_model: Any, start: Plan, time_limit_s: float) -> Solution:
    """What the solver makes of a plan."""
    sizes = [aligned(life.num_bytes) for life in start.lifetimes]
    unit = gcd(*sizes)  # small numbers are quicker
    highest = aligned(start.end) // unit
    model = cp_model.CpModel()
    top = model.new_int_var(start.lower_bound_bytes // unit, highest, "top")
    requests, ranges, bottoms = [], [], []
    for life, size, offset in zip(start.lifetimes, (each // unit for each in sizes), start.offsets, strict=True):
        bottom = model.new_int_var(0, highest - size, "")
        model.add_hint(bottom, offset // unit)
        model.add(bottom + size <= top)
        bottoms.append(bottom)
        if size:
            requests.append(model.new_fixed_size_interval_var(life.first, life.last + 1 - life.first, ""))
            ranges.append(model.new_fixed_size_interval_var(bottom, size, ""))
    model.add_no_overlap_2d(requests, ranges)
    model.minimize(top)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = 1  # all cores, for two seconds, would be seen in whatever is measured beside it
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # the time was too short even for the start
        return Solution(start, False)
    offsets = tuple(solver.value(bottom) * unit for bottom in bottoms)
    return Solution(Plan(start.lifetimes, offsets), status == cp_model.OPTIMAL)
