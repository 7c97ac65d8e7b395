"""What is told of every run, and what its memory is made of: one list for tables, tiles and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eet_lab.words import MiB


@dataclass(frozen=True)
class Metric:
    """One number of a run. `read` takes a `Measurement` and gives a `Spread`, a number, or None where it is missing.

    `key` is its name in a `Measurement` and in the `changes` of a result; empty where it is not timed.
    """

    name: str
    unit: str
    read: Callable[[Any], Any]
    more_is_better: bool = False
    key: str = ""


TIMES = (
    Metric("time to first token", "ms", lambda m: m.ttft_ms, key="ttft_ms"),
    Metric("time per output token", "ms", lambda m: m.tpot_ms, key="tpot_ms"),
    Metric("end to end", "ms", lambda m: m.total_ms, key="total_ms"),
    Metric("throughput", "tokens/s", lambda m: m.tokens_per_s, more_is_better=True, key="tokens_per_s"),
)
"""A `Generation` has these too, as plain numbers."""

PEAK = Metric("peak memory", "MiB", lambda m: m.memory["peak"] / MiB)
ENERGY = Metric("energy", "J/token", lambda m: m.joules_per_token)
PERPLEXITY = Metric("perplexity", "", lambda m: m.perplexity and m.perplexity.value)

MEMORY_PARTS = {
    "weights": "weights",
    "kv": "KV cache",
    "kv_growth": "its copy while it grows",
    "activations": "activations",
    "workspace": "workspaces and graphs",
}
"""What the peak is made of, by the keys of `Measurement.memory`."""

STEADY_RUNS = {"cpu": 1.5, "cuda": 1.25}
"""Above this ratio of the longest to the shortest run, a result carries a warning. A GPU's own times are steadier."""
