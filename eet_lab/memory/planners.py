"""Planners: lifetimes in, offsets in one arena out. Two tensors that live at the same time never share a byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eet_lab.memory.gaps import Occupancy
from eet_lab.memory.lifetimes import Lifetime, Plan, aligned

Planner = Callable[[Sequence[Lifetime]], Plan]


def greedy_by_size(lifetimes: Sequence[Lifetime]) -> Plan:
    """Largest tensor first, each at the lowest offset that is free for as long as it lives.

    Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020), where the gap that
    fits best is taken; TurboTransformers calls it GSOC.
    """
    return _place(lifetimes, sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].num_bytes))


def first_fit(lifetimes: Sequence[Lifetime]) -> Plan:
    """Tensors in order of first use, each at the lowest offset that is free for as long as it lives."""
    return _place(lifetimes, sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first))


def no_reuse(lifetimes: Sequence[Lifetime]) -> Plan:
    """Every tensor has bytes of its own: what a program costs that never frees."""
    offsets, end = [], 0
    for life in lifetimes:
        offsets.append(end)
        end += aligned(life.num_bytes)
    return Plan(tuple(lifetimes), tuple(offsets))


def _place(lifetimes: Sequence[Lifetime], order: Iterable[int]) -> Plan:
    """One after the other, each at the lowest offset where it fits."""
    offsets, occupancy = [0] * len(lifetimes), Occupancy()
    for i in order:
        life = lifetimes[i]
        offsets[i] = _lowest(occupancy, life)
        occupancy.take(life, offsets[i])
    return Plan(tuple(lifetimes), tuple(offsets))


def _lowest(occupancy: Occupancy, life: Lifetime) -> int:
    *inner, (top, _) = occupancy.gaps(life)
    return next((start for start, stop in inner if stop - start >= life.num_bytes), top)


PLANNERS: dict[str, Planner] = {f.__name__: f for f in (greedy_by_size, first_fit, no_reuse)}
