"""Ops timed alone: ours beside PyTorch's own and FlashInfer's, on the cases that test them."""

from eet_lab.bench.ops.benchmark import benchmark_op
from eet_lab.bench.ops.providers import PROVIDERS
from eet_lab.bench.ops.workload import OpWorkload

__all__ = ["PROVIDERS", "OpWorkload", "benchmark_op"]
