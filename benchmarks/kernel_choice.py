"""Every kernel that can take a product of few tokens, beside cuBLAS, by size: evidence for ops/cuda/linear.py.

    python benchmarks/kernel_choice.py --out h200-kernel-choice.json --commit COMMIT

Needs an NVIDIA GPU, half a minute and 6 GB of its memory. A time is of one launch in a CUDA graph, with early launches,
over weights of 300 MB or more in turn: microseconds in fp16, the least of four replays, which varies by some percent;
null where a kernel does not take the size. Products are linear + residual, and norm + linear + GELU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from eet_lab.bench.environment import device_name, versions
from eet_lab.errors import EETError
from eet_lab.ops import cuda, native
from eet_lab.ops.cuda import linear
from eet_lab.ops.shapes import LinearShape, copied
from eet_lab.ops.types import fresh

KERNELS = ("vector_linear", "linear", "register_linear", None)  # None: cuBLAS, with what surrounds it
TOKENS = (1, 2, 3, 4, 6, 8, 9, 12, 16)
RESIDUAL = ((1024, 4096), (4096, 4096), (1280, 5120), (5120, 5120), (2048, 8192), (8192, 8192), (3072, 12288))
RESIDUAL += ((12288, 12288), (4096, 16384), (5120, 20480), (6144, 24576), (7168, 28672), (8192, 32768), (10240, 40960))
RESIDUAL += ((12288, 49152), (16384, 65536))
NORM = ((6144, 2048), (10240, 2560), (12288, 4096), (16384, 4096), (20480, 5120), (24576, 6144), (24576, 8192))
NORM += ((32768, 8192), (36864, 12288), (49152, 12288), (32768, 16384), (16384, 20480), (16384, 28672), (16384, 36864))
LEAST_BYTES = 300_000_000  # of weights that are read in turn, so that no cache holds them
REPLAYS = 4


def shapes(residual: bool) -> list[LinearShape]:
    """T tokens, N outputs and C inputs of every product that is timed."""
    act = None if residual else "gelu_tanh"
    sizes = RESIDUAL if residual else NORM
    return [LinearShape(T, N, C, act, residual=residual) for N, C in sizes for T in TOKENS]


def times(shape: LinearShape) -> list[float | None]:
    """Microseconds by KERNELS."""
    op: Callable[..., Any] = cuda.linear_residual if shape.residual else cuda.norm_linear
    one = shape.inputs("cuda", torch.float16, 0)
    calls = [one, *(copied(one) for _ in range(LEAST_BYTES // (2 * shape.N * shape.C)))]
    return [_time(op, calls, kernel) for kernel in KERNELS]


def _time(op: Callable[..., Any], calls: Sequence[Any], kernel: str | None) -> float | None:
    with patch.object(linear, "streaming_kernel", lambda *sizes, **how: kernel):
        try:
            op(*calls[0], empty=fresh, dependent=True)
        except EETError:
            return None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for inputs in calls * 2:
                op(*inputs, empty=fresh, dependent=True)
    graph.replay()
    least = float("inf")
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        least = min(least, begin.elapsed_time(end) * 1e3 / (2 * len(calls)))
    return round(least, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    args = parser.parse_args()
    if problem := native.available("cuda"):
        parser.error(problem)
    native.prepare(cuda.linear_residual.kernels + cuda.norm_linear.kernels)
    columns = ["T", "N", "C", *("cublas" if kernel is None else kernel for kernel in KERNELS)]
    head = {"gpu": device_name("cuda"), **versions("cuda"), "commit": args.commit, "columns": columns}
    rows = {name: [[s.T, s.N, s.C, *times(s)] for s in shapes(name == "residual")] for name in ("residual", "norm")}
    args.out.write_text(told(head, rows))


def told(head: dict[str, Any], rows: dict[str, list[list[Any]]]) -> str:
    """JSON with a row a line."""
    parts = [f'"{name}": [\n  ' + ",\n  ".join(map(json.dumps, lines)) + "\n ]" for name, lines in rows.items()]
    return json.dumps(head)[:-1] + ",\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
