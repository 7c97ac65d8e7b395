"""Measuring: Compare, Ladder, the cost model, peers to compare with, and results that can be kept."""

from __future__ import annotations

from eet_lab.bench.results import (
    MEMORY_KEYS,
    Comparison,
    Cost,
    Environment,
    Ladder,
    Measurement,
    Rung,
    Sameness,
    Spread,
    load_result,
)

__all__ = [
    "MEMORY_KEYS",
    "Comparison",
    "Cost",
    "Environment",
    "Ladder",
    "Measurement",
    "Rung",
    "Sameness",
    "Spread",
    "load_result",
]
