"""How near a simulation comes to what was measured on the same traffic."""

from __future__ import annotations

from typing import NamedTuple

from eet_lab.scheduling.served import Latencies

COMPARED = {"ttft_ms": "TTFT", "tpot_ms": "time per token"}
PERCENTS = ("p50", "p99")
THROUGHPUT = "throughput"


class Compared(NamedTuple):
    """A number that was simulated, and the same measured; in `unit`."""

    name: str
    unit: str
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        """How far the simulation is above what was measured, as a share of the latter."""
        return self.simulated / self.measured - 1


def agreement(simulated: Latencies, measured: Latencies) -> list[Compared]:
    """TTFT and time per token at p50 and p99, and throughput; of an encoder, which tells no tokens, its one latency."""
    found = [Compared(THROUGHPUT, "requests/s", simulated.requests_per_s, measured.requests_per_s)]
    for metric, name in COMPARED.items():
        both = simulated.percentiles[metric], measured.percentiles[metric]
        if all(both):
            found += [Compared(f"{name} {at}", "ms", both[0][at], both[1][at]) for at in PERCENTS]
    return found
