"""Planners: lifetimes in, offsets out. Two tensors that live at the same time never share a byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eet_lab.memory.lifetimes import Lifetime, Plan

Planner = Callable[[Sequence[Lifetime]], Plan]


def greedy_by_size(lifetimes: Sequence[Lifetime]) -> Plan:
    """Largest tensor first, each at the lowest offset that is free for as long as it lives.

    Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020).
    """
    return _place(lifetimes, sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].num_bytes))


def first_fit(lifetimes: Sequence[Lifetime]) -> Plan:
    """In order of first use, each at the lowest offset that is free for as long as it lives."""
    return _place(lifetimes, sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first))


def no_reuse(lifetimes: Sequence[Lifetime]) -> Plan:
    """Every tensor has bytes of its own: what a program costs that never frees."""
    offsets, end = [], 0
    for life in lifetimes:
        offsets.append(end)
        end += life.num_bytes
    return Plan(tuple(lifetimes), tuple(offsets))


def _place(lifetimes: Sequence[Lifetime], order: Iterable[int]) -> Plan:
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, Lifetime]] = []  # (start, stop, who), by start
    for i in order:
        life, offset = lifetimes[i], 0
        for start, stop, other in placed:
            if not life.overlaps(other):
                continue
            if offset + life.num_bytes <= start:
                break
            offset = max(offset, stop)
        offsets[i] = offset
        placed.append((offset, offset + life.num_bytes, life))
        placed.sort(key=lambda entry: entry[0])
    return Plan(tuple(lifetimes), tuple(offsets))


PLANNERS: dict[str, Planner] = {f.__name__: f for f in (greedy_by_size, first_fit, no_reuse)}
