"""Time the loss with the LM head and the update of a flat optimizer, beside PyTorch's: milliseconds, bytes, memory.

    python benchmarks/train_kernels.py [loss] [optimizer] [--repeats 20]

Needs an NVIDIA GPU. The bound beside a time is its bytes over the bandwidth that a copy reaches in this run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional

from eet_lab.losses import linear_cross_entropy
from eet_lab.ops.cuda.train_loss import cross_entropy_with_grad
from eet_lab.ops.cuda.train_optimizer import norm_of
from eet_lab.ops.types import Linear
from eet_lab.parts import losses
from eet_lab.parts.buffers import Update
from eet_lab.parts.optimizers import FlatAdamW, FlatSGD

N, C, V = 8192, 768, 50257
NUM_WEIGHTS = 124_439_808
HALF = torch.bfloat16


def timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """The median of milliseconds, and the most MiB that were allocated beyond what was."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found), (torch.cuda.max_memory_allocated() - before) / 2**20


def told(name: str, call: Callable[[], Any], repeats: int, num_bytes: float = 0, bandwidth: float = 1) -> None:
    """One line."""
    ms, mib = timed(call, repeats)
    share = f"  {num_bytes / ms / 1e6:7,.0f} GB/s  {num_bytes / ms / 1e6 / bandwidth:6.1%}" if num_bytes else ""
    print(f"{name:44}{ms:9.3f} ms {mib:9,.0f} MiB{share}", flush=True)


def bandwidth_of_a_copy(repeats: int) -> float:
    """GB/s, read and written."""
    x = torch.empty(1 << 29, device="cuda", dtype=HALF)
    y = torch.empty_like(x)
    return 2 * x.numel() * 2 / timed(lambda: y.copy_(x), repeats)[0] / 1e6


def loss(repeats: int, bandwidth: float) -> None:
    """Forward and backward with the LM head, and the kernel of the loss alone."""
    states = torch.randn(N, C, device="cuda", dtype=HALF).requires_grad_()
    weight = (torch.randn(V, C, device="cuda") * 0.02).to(HALF).requires_grad_()
    labels = torch.randint(V, (N,), device="cuda")

    def plain(states: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy((states @ weight.t()).float(), labels)

    def step(of: Callable[[Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(of(states, weight), (states, weight))

    def chunked(states: Tensor, weight: Tensor, chunk: int, how: losses.InPlace) -> Tensor:
        head = losses.Head(lambda rows, linear: linear(rows, Linear(weight, None)), (weight,))
        return losses.Chunked(chunk)(states, labels, head, cross_entropy=how) / N

    told("head and loss: eager", partial(step, plain), repeats)
    told("head and loss: compiled", partial(step, torch.compile(plain)), repeats)
    in_place = partial(step, partial(chunked, chunk=1024, how=losses.cross_entropy_in_place))
    told("head and loss: chunks of 1,024, PyTorch", in_place, repeats)
    for chunk in (512, 1024, 2048, 4096, 8192):
        call = partial(step, partial(linear_cross_entropy, target=labels, chunk=chunk))
        told(f"head and loss: chunks of {chunk:,}, fused", call, repeats)
    for words in (V, 50304):
        logits = torch.randn(2048, words, device="cuda", dtype=HALF)
        call = partial(cross_entropy_with_grad, logits, labels[:2048].clamp(max=words - 1), 0.0)
        told(f"loss and gradient alone: 2,048 x {words:,}", call, repeats, 2 * logits.numel() * 2, bandwidth)


def optimizer(repeats: int, bandwidth: float) -> None:
    """Updates of GPT-2's weights, and the norm of their gradients."""
    numbers = Update.of(1e-4, 1.0, 3, torch.device("cuda"))
    for kind, master, num_bytes in (
        (FlatAdamW, "float32", 28),
        (FlatAdamW, "none", 22),
        (FlatAdamW, "stochastic", 22),
        (FlatSGD, "float32", 12),
    ):
        weights = torch.zeros(NUM_WEIGHTS, device="cuda", dtype=HALF).requires_grad_()
        made = kind([weights], master=master)
        of_all = num_bytes * NUM_WEIGHTS
        told(f"{kind.__name__}, master {master}", partial(made.update, numbers), repeats, of_all, bandwidth)
        grads = made.buffers[0].grads
        told("  norm of its gradients", partial(norm_of, [grads]), repeats, 2 * NUM_WEIGHTS, bandwidth)
        del made, weights, grads
    wide = torch.zeros(NUM_WEIGHTS, device="cuda").requires_grad_()
    wide.grad = torch.zeros_like(wide)
    its = torch.optim.AdamW([wide], fused=True)
    told("torch.optim.AdamW, fused, fp32", its.step, repeats, 28 * NUM_WEIGHTS, bandwidth)
    told("FlatAdamW, fp32", partial(FlatAdamW([wide]).update, numbers), repeats, 28 * NUM_WEIGHTS, bandwidth)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["loss", "optimizer"])
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    reached = bandwidth_of_a_copy(asked.repeats)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy reaches {reached:,.0f} GB/s")
    for name in asked.what:
        {"loss": loss, "optimizer": optimizer}[name](asked.repeats, reached)
