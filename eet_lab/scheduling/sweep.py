"""Latency against load: the same requests, closer and closer together, served by several policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eet_lab.errors import CostError
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policy import BasePolicy
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import Traffic

FULL = 0.98
"""The share of busy time above which more comes than can be served: latency then grows for as long as it lasts."""


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
