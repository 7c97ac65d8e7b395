"""Time the fused elementwise kernels of training beside eager and compiled PyTorch: microseconds and GB/s.

    python benchmarks/train_ops.py [norms] [activations] [residuals] [embeddings] [--dtype bfloat16]

Needs an NVIDIA GPU. Times are of replayed graphs, so no host is in them; several sets of buffers keep L2 from helping.
Of a backward pass GB/s counts what has to be read and written once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional

from eet_lab.ops import reference
from eet_lab.ops.cuda import train_embedding, train_epilogue, train_norm
from eet_lab.ops.noise import Dropout, token_keys
from eet_lab.ops.types import Norm, autograd

T, REPEATS, BEYOND_L2 = 8192, 15, 200 << 20
Op = Callable[..., Tensor]


def told(
    name: str, ours: Op, plain: Op, shapes: Sequence[Sequence[int]], out: Sequence[int], moved: int, dtype: torch.dtype
) -> None:
    """Forward and backward of each, for inputs of these shapes; `moved` numbers are read and written backward."""
    torch._dynamo.reset()
    stream = torch.cuda.Stream()  # autograd goes back on the stream of the way forward
    with torch.cuda.stream(stream):
        sets = [[real(*shape, dtype=dtype) for shape in shapes] for _ in range(max(2, BEYOND_L2 // (moved * 2)))]
        douts = [torch.randn(*out, device="cuda", dtype=dtype) for _ in sets]
        for provider, op in {"eager": plain, "compiled": torch.compile(plain), "ours": ours}.items():
            forward = timed([partial(op, *own) for own in sets], stream)
            backward = timed(
                [partial(back, op(*own), own, dout) for own, dout in zip(sets, douts, strict=True)], stream
            )
            speed = moved * dtype.itemsize / backward / 1e3
            print(f"{name:34}{provider:10}forward {forward:7.1f} us  backward {backward:7.1f} us {speed:6,.0f} GB/s")


def back(out: Tensor, inputs: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, dout, retain_graph=True)


def timed(calls: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> float:
    """Microseconds of one call, by a graph of all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    found = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(found)


def real(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def norms(dtype: torch.dtype) -> None:
    """Layer norm and RMS norm."""

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return functional.rms_norm(x, x.shape[-1:], weight, 1e-5)
        return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return train_norm.norm(x, Norm(weight, bias, 1e-5), empty=autograd)

    for C in (512, 768, 1024, 4096, 8192):
        for kind, shapes in (("layer", [(T, C), (C,), (C,)]), ("rms", [(T, C), (C,)])):
            told(f"{kind} norm {T:,} x {C:,}", ours, plain, shapes, (T, C), 3 * T * C, dtype)


def activations(dtype: torch.dtype) -> None:
    """Bias and activation."""

    def plain(y: Tensor, bias: Tensor, act: str) -> Tensor:
        return reference.activate(y + bias, act, empty=autograd)

    def ours(y: Tensor, bias: Tensor, act: str) -> Tensor:
        return train_epilogue.Epilogue.apply(y, bias, None, act, None)

    for act, N, F in (("gelu_tanh", 3072, 3072), ("gelu", 3072, 3072), ("relu", 4096, 4096), ("swiglu", 8192, 4096)):
        ops = (partial(op, act=act) for op in (ours, plain))
        told(f"{act} {T:,} x {F:,}", *ops, [(T, N), (N,)], (T, F), T * (2 * N + F), dtype)


def residuals(dtype: torch.dtype) -> None:
    """Bias, dropout, residual; PyTorch's dropout where we draw by keys."""
    numbers, C = torch.arange(T, device="cuda"), 768
    keys = token_keys(1, numbers // 1024, numbers % 1024)

    def plain(y: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
        return functional.dropout(y + bias, p) + residual

    def ours(y: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
        noise = Dropout(p, 0.0, keys, numbers).noise()
        return train_epilogue.Epilogue.apply(y, bias, residual, None, noise)

    for p in (0.0, 0.1):
        ops = (partial(op, p=p) for op in (ours, plain))
        moved = (2 if p else 1) * T * C
        told(f"bias, dropout {p}, residual {T:,} x {C}", *ops, [(T, C), (C,), (T, C)], (T, C), moved, dtype)


def embeddings(dtype: torch.dtype) -> None:
    """Token and position embedding, of ids that are as frequent as words."""
    V, C = 50257, 768
    ids = (torch.rand(T, device="cuda") ** 4 * V).long()
    positions = torch.arange(T, device="cuda") % 1024

    def plain(token: Tensor, position: Tensor) -> Tensor:
        return functional.embedding(ids, token) + functional.embedding(positions, position)

    def ours(token: Tensor, position: Tensor) -> Tensor:
        return train_embedding.embedded(ids, positions, None, token, position, None, empty=autograd)

    told(f"embeddings {T:,} x {C}", ours, plain, [(V, C), (1024, C)], (T, C), V * C, dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=["norms", "activations", "residuals", "embeddings"])
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.dtype}")
    for name in asked.what:
        {"norms": norms, "activations": activations, "residuals": residuals, "embeddings": embeddings}[name](
            getattr(torch, asked.dtype)
        )
