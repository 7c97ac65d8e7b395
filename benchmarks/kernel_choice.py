"""Every kernel that can take a product of few tokens, beside cuBLAS, by size: evidence for ops/cuda/choice.py.

    python benchmarks/kernel_choice.py --out h200-kernel-choice.json --commit COMMIT

Needs an NVIDIA GPU and 6 GB of its memory. A time is of one product in a CUDA graph, with early launches,
over weights of 300 MB or more in turn and activations that stay, as a layer finds what the one before it left:
microseconds in fp16, the least of four replays, which varies by some percent; null where a kernel does not take the
size. Products are linear + residual, and norm + linear + GELU; those of int8 weights are cuBLAS's after they were
expanded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eet_lab.bench.measured import device_name, versions
from eet_lab.bench.timing import captured, took_ms
from eet_lab.errors import EETError
from eet_lab.ops import cuda, native
from eet_lab.ops.cuda import choice, linear
from eet_lab.ops.int8 import quantized
from eet_lab.ops.shapes import copied
from eet_lab.ops.types import Linear, Norm, fresh

KERNELS = ("vector_linear", "linear", "register_linear", "cublas")
INT8_KERNELS = ("int8_linear", "cublas")
TOKENS = (1, 2, 3, 4, 6, 8, 9, 10, 12, 14, 16)
INT8_TOKENS = (1, 4, 6, 8, 9, 12, 14, 16)
RESIDUAL = ((1024, 4096), (4096, 4096), (1280, 5120), (5120, 5120), (1536, 6144), (6144, 6144), (1792, 7168))
RESIDUAL += ((2048, 8192), (8192, 8192), (2560, 10240), (3072, 12288), (12288, 12288), (4096, 16384), (5120, 20480))
RESIDUAL += ((6144, 24576), (7168, 28672), (8192, 32768), (10240, 40960), (12288, 49152), (16384, 65536))
NORM = ((6144, 2048), (10240, 2560), (12288, 4096), (16384, 4096), (20480, 5120), (24576, 6144), (24576, 8192))
NORM += ((32768, 8192), (36864, 12288), (49152, 12288), (32768, 16384), (16384, 20480), (16384, 28672), (16384, 36864))
INT8_RESIDUAL = ((4096, 4096), (8192, 8192), (2560, 10240), (4096, 16384), (5120, 20480))
INT8_NORM = ((12288, 4096), (16384, 4096), (20480, 5120), (24576, 6144), (32768, 8192), (32768, 10240))
LEAST_BYTES = 300_000_000  # of weights that are read in turn, so that no cache holds them
REPLAYS = 4


@dataclass(frozen=True)
class Product:
    """Sizes of one kind, and the kernels that are timed at each: outputs and inputs, every one with all `tokens`."""

    kernels: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    normed: bool

    @property
    def columns(self) -> list[str]:
        """Of a row: tokens, outputs, inputs, and microseconds by kernel."""
        return ["T", "N", "C", *self.kernels]

    def rows(self) -> Iterator[list[Any]]:
        """Times every kernel at every size."""
        for N, C in self.sizes:
            weights = self.weights(N, C)
            for T in self.tokens:
                calls = self.calls(random(T, C), weights, random(T, N))
                yield [T, N, C, *(self.time(calls, kernel) for kernel in self.kernels)]

    def weights(self, N: int, C: int) -> list[Linear]:
        """So many that no cache holds them."""
        weight, bias = random(N, C) * C**-0.5, random(N)
        one = Linear(weight, bias)
        if self.is_int8:
            whole, scale = quantized(weight)
            one = Linear(whole, bias, scale)
        return [one, *(copied(one) for _ in range(LEAST_BYTES // one.weight.nbytes))]

    def calls(self, x: Tensor, weights: Sequence[Linear], residual: Tensor) -> list[Callable[[], Any]]:
        """The op with each of the weights."""
        how: dict[str, Any] = {"empty": fresh, "dependent": True}
        if not self.normed:
            return [partial(cuda.linear_residual, x, w, residual, **how) for w in weights]
        C = x.shape[1]
        norms = [Norm(random(C), random(C), 1e-5) for _ in weights]
        pairs = zip(norms, weights, strict=True)
        return [partial(cuda.norm_linear, x, norm_w, w, "gelu_tanh", **how) for norm_w, w in pairs]

    def time(self, calls: Sequence[Callable[[], Any]], kernel: str) -> float | None:
        """Microseconds of a call; None where the kernel does not take it."""
        runs = [*calls, *calls]
        with only(kernel):
            try:
                runs[0]()
            except EETError:
                return None
            graph = captured(runs)
        return round(min(took_ms(graph.replay, "cuda") for _ in range(REPLAYS)) * 1e3 / len(runs), 1)

    @property
    def is_int8(self) -> bool:
        """Whether its weights are."""
        return self.kernels == INT8_KERNELS


PRODUCTS = {
    "residual": Product(KERNELS, RESIDUAL, TOKENS, normed=False),
    "norm": Product(KERNELS, NORM, TOKENS, normed=True),
    "int8_residual": Product(INT8_KERNELS, INT8_RESIDUAL, INT8_TOKENS, normed=False),
    "int8_norm": Product(INT8_KERNELS, INT8_NORM, INT8_TOKENS, normed=True),
}


def random(*shape: int) -> Tensor:
    """Normal numbers in fp16, drawn on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


@contextmanager
def only(kernel: str) -> Iterator[None]:
    """Every product is this kernel's, and none is multiplied in tiles."""
    taken = None if kernel == "cublas" else kernel

    with (
        patch.object(linear, "streaming_kernel", lambda *sizes, **how: taken),
        patch.object(choice, "streamed", partial(choice.streamed, kernel=kernel)),
        patch.object(choice, "takes_int8", lambda *sizes: taken is not None),
        patch.object(linear, "takes_tiles", lambda *sizes: False),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    args = parser.parse_args()
    if problem := native.available("cuda"):
        parser.error(problem)
    native.prepare(cuda.linear_residual.kernels + cuda.norm_linear.kernels)
    head = {"gpu": device_name("cuda"), **versions("cuda"), "commit": args.commit}
    found: dict[str, list[list[Any]]] = {}
    for name, product in PRODUCTS.items():
        found[name] = [product.columns, *product.rows()]
        args.out.write_text(as_json(head, found))  # what is timed stays, should the time run out
        print(f"{name}: {len(found[name]) - 1} sizes")


def as_json(head: dict[str, Any], tables: dict[str, list[list[Any]]]) -> str:
    """JSON with a row a line."""
    parts = [f'"{name}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for name, rows in tables.items()]
    return json.dumps(head)[:-1] + ",\n " + ",\n ".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
