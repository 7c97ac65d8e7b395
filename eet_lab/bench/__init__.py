"""Measuring: Compare, Ladder, the cost model, peers to compare with, and results that can be kept."""

from __future__ import annotations

from eet_lab.bench.benchmark import benchmark
from eet_lab.bench.compare import compare, ladder
from eet_lab.bench.held_out import perplexity
from eet_lab.bench.measure import measure, watched
from eet_lab.bench.measured import Cost, Environment, Measurement, Parity, Perplexity, Spread
from eet_lab.bench.paired import Change
from eet_lab.bench.parity import parity
from eet_lab.bench.results import Comparison, Ladder, Run, Rung, load_result
from eet_lab.bench.run_memory import MEMORY_KEYS
from eet_lab.bench.workloads import RunInputs, Workload, default_prompts

__all__ = [
    "MEMORY_KEYS",
    "Change",
    "Comparison",
    "Cost",
    "Environment",
    "Ladder",
    "Measurement",
    "Parity",
    "Perplexity",
    "Run",
    "RunInputs",
    "Rung",
    "Spread",
    "Workload",
    "benchmark",
    "compare",
    "default_prompts",
    "ladder",
    "load_result",
    "measure",
    "parity",
    "perplexity",
    "watched",
]
