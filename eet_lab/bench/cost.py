"""The cost model: the bytes that a decode step must read and the arithmetic of a training step, and the least time.

At small batches a step is bound by memory: every weight is read once, and every row's keys and values. The floor is
those bytes at the rate that a streaming read reaches on this device. A prediction adds what launching costs: see
`predicted_ms`. A step of training is bound by what it computes: `train_flops`, at the rate of a large product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from eet_lab.bench.launches import StepLaunches
from eet_lab.bench.measured import Cost, Spread
from eet_lab.bench.timing import Timed, host_us, took_ms
from eet_lab.devices import once_per_device
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder, tensors
from eet_lab.monitor import free_bytes_of
from eet_lab.ops.int8 import dequantized
from eet_lab.ops.oom import memory_for
from eet_lab.ops.types import Spec
from eet_lab.training.step import Work
from eet_lab.words import MiB

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

TIMES = 4
"""A buffer is so many times as large as the last cache: a smaller one could stay in part in a cache that is not LRU."""

MOST_BYTES = 512 * 2**20
"""The largest such buffer, so that a small machine does not run out of memory."""


def last_cache_bytes(folder: Path = CACHES) -> int | None:
    """The size of a core's largest data cache; None where the system does not tell it."""
    sizes = [_num_bytes(each / "size") for each in folder.glob("index*") if _text(each / "type") != "Instruction"]
    return max(sizes, default=0) or None


def beyond_caches(least: int, cache_bytes: int | None) -> int:
    """Bytes beyond a cache of that size, at least `least`."""
    return min(max(least, TIMES * (cache_bytes or 0)), max(least, MOST_BYTES))


def _num_bytes(file: Path) -> int:
    """The bytes of a size such as `107520K`; 0 for what is no size."""
    text = _text(file)
    number, unit = text.rstrip("KMG"), UNITS.get(text[-1:], 1)
    return int(number) * unit if number.isdecimal() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


NUM_BYTES = {"cuda": 4 * 2**30, "cpu": beyond_caches(128 * 2**20, last_cache_bytes())}
"""The bytes of the streaming read: far beyond any cache."""

MATMUL = {"cuda": (8192, 20), "cpu": (512, 5)}
"""Rows of the square matrices of a product that sets the ceiling, and how often it is timed."""

WIDTH = 4096
"""Columns of the matrix where a CPU's streaming read is a matrix-vector product."""

NUM_LAUNCHES = 500
"""Launches in a row when their cost is measured: fewer than the driver's queue holds, so that the host never waits."""


class LaunchCost(NamedTuple):
    """Microseconds of an empty kernel within a CUDA graph, and of the host for one eager launch."""

    kernel_us: float
    launch_us: float


def step_cost(
    model: Decoder,
    rows: Sequence[Sequence[int]],
    new_tokens: int,
    tpot_ms: Spread | None,
    launches: float | None = None,
) -> Cost:
    """The cost of a decode step half-way through `new_tokens`, beside the time per output token that was measured."""
    weights = step_weight_bytes(model)
    kv = round(sum(len(row) + new_tokens / 2 for row in rows) * model.config.kv_bytes_per_token(model.dtype.itemsize))
    ceiling = streaming_gb_per_s(model.device.type)
    return Cost(
        weight_bytes=weights,
        kv_bytes=kv,
        ceiling_gb_per_s=round(ceiling, 2),
        floor_ms=round((weights + kv) / ceiling / 1e6, 5),
        gb_per_s=None if tpot_ms is None else round((weights + kv) / tpot_ms.p50 / 1e6, 3),
        launches_per_token=launches,
    )


def predicted_ms(step_bytes: int, counted: StepLaunches, device: str) -> float:
    """What a step that moves so many bytes should take here: `step_ms` at this device's rate and prices."""
    return round(step_ms(step_bytes / streaming_gb_per_s(device) / 1e6, counted, launch_cost(device)), 5)


def expansion_ms(model: Decoder) -> float:
    """The time of a step that plain PyTorch spends on a CPU to dequantize int8 weights and to read the result back.

    The floor has only what must be read, so it leaves this out. It is 0 on a GPU: kernels convert in registers there,
    and the prediction does not cover the cases where they cannot.
    """
    if model.device.type != "cpu":
        return 0.0
    number = sum(t.numel() for t in tensors((model.layers, model.head)) if t.dtype == torch.int8)
    return number and number * (expansion_ns() / 1e6 + model.dtype.itemsize / streaming_gb_per_s("cpu") / 1e6)


def step_ms(floor_ms: float, counted: StepLaunches, price: LaunchCost | None) -> float:
    """What a step should take: the slower of the device and of the host that feeds it; on a CPU the sum of both.

    The device: the floor, which is the step's bytes at the streaming rate, and for each kernel what one without work
    costs in a graph, since a kernel's start and end are not covered by its neighbours. The host: what PyTorch takes to
    launch one kernel, for each launch. So it leaves out that a kernel reaches the full rate only after a while, and
    that programmatic dependent launch does cover starts and ends: what is measured can lie on either side.
    No price: a CPU, which reads and calls in turn.
    """
    if price is None:
        return floor_ms + counted.launches * call_us() / 1e3
    return max(floor_ms + counted.kernels * price.kernel_us / 1e3, counted.launches * price.launch_us / 1e3)


@once_per_device
def launch_cost(device: str) -> LaunchCost | None:
    """What a kernel launch costs on this GPU: the best of a few measurements, once per process; None on a CPU."""
    if device == "cpu":
        return None
    number = torch.zeros(1, device=device)

    def launch() -> None:
        number.add_(0)

    timed = Timed([launch] * NUM_LAUNCHES, device)
    kernel_us = min(timed.ms() for _ in range(3)) * 1e3
    launch_us = []
    for _ in range(7):
        torch.cuda.synchronize()
        launch_us.append(host_us(launch, NUM_LAUNCHES))
    return LaunchCost(round(kernel_us, 4), round(min(launch_us), 4))


def train_flops(config: Config, work: Work) -> float:
    """The floating-point operations of a training step: forward, and backward with twice as many.

    Counted are the products of matrices, by two a multiplication, of real tokens, and of attention what is seen; the
    head is read for labels alone. What is computed twice counts once, and norms and the like do not count. Source:
    PaLM (Chowdhery et al., 2022), appendix B, whose formula counts the attention of a causal text whole.
    """
    flops = 2.0 * work.num_labels * work.head_size
    tokens, sources = (sum(each) for each in zip(*work.sizes, strict=True))
    for stack, (num_layers, shapes) in config.stacks().items():
        matrices = {path: prod(shape) for path, shape in shapes.items() if len(shape) > 1}
        of_sources = matrices.pop("cross.kv.weight", 0)
        if stack == "encoder.":
            read, seen = sources, sum(s * s for _, s in work.sizes)
        else:
            read, seen = tokens, sum(_num_scores(config.spec, n) + n * s for n, s in work.sizes)
        products = read * sum(matrices.values()) + sources * of_sources
        flops += num_layers * (2 * products + 4 * config.num_heads * config.head_dim * seen)
    return 3 * (flops + 2 * tokens * prod(config.outer_shapes().get("patches.weight", (0,))))


def mfu(config: Config, work: Work, ms: float, device: str) -> float | None:
    """The share of the measured ceiling that a step's arithmetic reached; None on a CPU, whose caches and threads make
    that ceiling say little of a model's small products.
    """
    if device == "cpu":
        return None
    return train_flops(config, work) / (ms * matmul_tflops(device, torch.bfloat16) * 1e9)


def arithmetic(flops: float, ms: float, device: str, dtype: torch.dtype) -> dict[str, float]:
    """What a row tells of operations that took so long: their share of the measured ceiling; nothing of none."""
    if not flops:
        return {}
    ceiling = matmul_tflops(device, dtype)
    return {"mfu": round(flops / ms / ceiling / 1e9, 4), "ceiling_tflops": round(ceiling, 2)}


def step_weight_bytes(model: Decoder) -> int:
    """Bytes of all layers, the last norm and the LM head; of the embeddings a step reads a few rows only."""
    read = {t.data_ptr(): t.numel() * t.element_size() for t in tensors((model.layers, model.norm, model.head))}
    return sum(read.values())


@once_per_device
def streaming_gb_per_s(device: str) -> float:
    """The rate in GB/s at which a large buffer can be read here: the best of a few sums, once per process and GPU.

    On a CPU a product with a vector is tried as well: it computes as a linear layer of one row does, and keeps more
    reads under way at once than a sum. Errors: OutOfMemory.
    """
    if device == "cuda":  # of one that is nearly full up to a half, or its cache would be timed
        free, least = torch.cuda.mem_get_info()[0], TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    else:
        free, least = free_bytes_of(torch.device(device)), 0
    num_bytes = min(NUM_BYTES[device], max(free // 4, min(least, free // 2)))
    with memory_for(f"a buffer of {num_bytes / MiB:.0f} MiB, to measure how fast memory can be read,"):
        buffer = torch.ones(num_bytes // 4, device=device)
        best_ms = min(took_ms(buffer.sum, device) for _ in range(7))
        if device == "cpu":
            rows, ones = buffer[: len(buffer) // WIDTH * WIDTH].view(-1, WIDTH), torch.ones(WIDTH)
            product = partial(torch.mv, rows, ones)
            best_ms = min(best_ms, *(took_ms(product, device) for _ in range(7)))
    return num_bytes / best_ms / 1e6


@once_per_device
def matmul_tflops(device: str, dtype: torch.dtype) -> float:
    """The rate in TFLOP/s that a large product of matrices reaches here: the best of a few, once per process and GPU.

    Its numbers are random: a GPU's clock is higher where most bits are 0.
    """
    size, tries = MATMUL[device]
    with memory_for(f"a product of matrices [{size},{size}], to measure how fast they are,"):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        best_ms = min(took_ms(partial(torch.mm, left, right), device) for _ in range(tries))
    return 2 * size**3 / best_ms / 1e9


@cache
def call_us() -> float:
    """What one call of PyTorch costs on the CPU when there is next to nothing to compute: the median of a few, once."""
    call = partial(torch.zeros(1).add_, 0)
    return median(host_us(call, 500) for _ in range(9))


@cache
def expansion_ns() -> float:
    """What plain PyTorch takes on the CPU to make a weight of one int8 number: the median of a few matrices, once."""
    whole, scale = torch.ones(1024, 1024, dtype=torch.int8), torch.ones(1024, 1)
    return median(
        host_us(lambda: dequantized(whole, scale, out=torch.empty(whole.shape)), 1) * 1e3 / whole.numel()
        for _ in range(9)
    )


def _num_scores(spec: Spec, num_tokens: int) -> int:
    """How many keys the queries of a row see, all together."""
    if not spec.causal:
        return num_tokens**2
    seen = min(num_tokens, spec.window or num_tokens)
    return seen * (seen + 1) // 2 + (num_tokens - seen) * seen
