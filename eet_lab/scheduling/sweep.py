"""Latency against load: the same requests, closer and closer together, served by several policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eet_lab.errors import CostError
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policy import BasePolicy
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import AT_ONCE, Traffic

FULL = 0.98
"""The share of busy time above which more comes than can be served: latency then grows for as long as it lasts."""

LOWEST, RISEN, BEYOND, STEP = 0.3, 3.0, 8.0, 1.5
"""Loads reach from this share of what can be served to where the p99 is so many times as long.

They end at so many times what can be served, since a few requests do not wait for long; steps look for the end.
"""
LEAST = 1e-6
"""The least rate there is."""


@dataclass(frozen=True)
class LoadPoint:
    """What one load came to, simulated or measured: `rate` requests came a second; `times` are `Served.percentiles`."""

    rate: float
    times: Mapping[str, Mapping[str, float]]
    requests_per_s: float
    busy: float

    @classmethod
    def of(cls, served: Served) -> LoadPoint:
        """The point of traffic that was served."""
        return cls(served.traffic.rate, served.percentiles, served.requests_per_s, served.busy)

    @property
    def is_full(self) -> bool:
        """Whether more came than could be served."""
        return self.busy > FULL


def sweep(
    make: Callable[[float], Traffic],
    policies: Mapping[str, BasePolicy],
    cost: CostTable,
    rates: Sequence[float],
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> dict[str, list[LoadPoint]]:
    """Points of each policy, from the lowest rate to the highest; `make` gives the traffic of a rate.

    A policy has no points from the first rate on at which its passes go beyond the table. Errors: ScheduleError,
    Cancelled.
    """
    found: dict[str, list[LoadPoint]] = {}
    for number, (name, policy) in enumerate(policies.items()):
        points = found[name] = []
        for at, rate in enumerate(sorted(rates)):
            if progress is not None:
                progress(number * len(rates) + at, len(policies) * len(rates), name)
            try:
                points.append(LoadPoint.of(simulate_traffic(make(rate), policy, cost, cancel=cancel)))
            except CostError:
                break
    return found


def rates_past_capacity(
    make: Callable[[float], Traffic],
    policies: Sequence[BasePolicy],
    cost: CostTable,
    rate: float,
    num: int,
    cancel: Cancel | None = None,
) -> list[float]:
    """So many rates, each the same number of times the one before, between which latency begins to grow.

    The first is below `rate` and what each policy can serve; at the last one the p99 of each has risen to RISEN times
    as much, or BEYOND times what the best of them can serve come. Policies whose passes go beyond the table do not
    count. Errors: ScheduleError, Cancelled.
    """

    def served(policy: BasePolicy, rate: float) -> LoadPoint | None:
        try:
            return LoadPoint.of(simulate_traffic(make(rate), policy, cost, cancel=cancel))
        except CostError:
            return None

    def p99_ms(policy: BasePolicy, rate: float) -> float:
        point = served(policy, rate)
        return math.inf if point is None else point.times["e2e_ms"]["p99"]

    best = {policy: point.requests_per_s for policy in policies if (point := served(policy, AT_ONCE)) is not None}
    low, high = max(LOWEST * min([rate, *best.values()]), LEAST), max([rate, *best.values()])
    limits, most = {policy: RISEN * p99_ms(policy, low) for policy in best}, min(BEYOND * high, AT_ONCE)
    while high < most and any(p99_ms(policy, high) < limit for policy, limit in limits.items()):
        high *= STEP
    return np.geomspace(low, high, num).tolist()
