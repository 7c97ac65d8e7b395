"""What launchers take: the plans of ops/cuda/plan.py, each number as it was measured with, none without the room."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from eet_lab.ops.cuda import layer, plan
from eet_lab.ops.cuda.launching import Limits
from eet_lab.ops.cuda.plan import Product
from linears.sources import GPUS

MEASURED = json.loads(Path(__file__).with_name("plans.json").read_text())
"""Plans as launchers made them in C++, when kernels were measured, by kernel: the GPU, sizes, and the launcher's
numbers; null: it does not fit. Those of `vector_layer` are bytes between rows, stages, and bytes of shared memory.
"""
MOST_TOKENS = {"linear": 16, "int8_linear": 16, "vector_linear": 4, "register_linear": 8, "wgmma_linear": 64}
FREE = {("shared_bytes", 1 << 30), ("log_cluster", 0), ("at_once", 1 << 30)}
"""What may be: CUDA refuses so many bytes, a cluster may have one block, and all stages may be asked for at once."""


def made(kernel: str, product: Product, gpu: tuple[int, int], grouped: bool = False, log: int | None = None):
    """A kernel's plan on a GPU. `grouped`: weights of several scales, or inputs that two blocks divide."""
    if kernel == "int8_linear":
        return plan.tiles(product, gpu[0], int8=True, grouped=grouped)
    if kernel == "wgmma_linear":
        return plan.clusters(product, gpu[0], tuple(gpu[1] >> i for i in range(3)), log)
    if kernel == "register_linear":
        return plan.register(product, gpu[0], divided=grouped)
    return {"linear": plan.tiles, "vector_linear": plan.vector}[kernel](product, gpu[0])


@pytest.mark.parametrize("kernel", ["linear", "int8_linear", "vector_linear", "register_linear"])
def test_plans_are_those_that_were_measured(kernel):
    for which, T, N, K, itemsize, normed, residual, gated, numbers in MEASURED[kernel]:
        gpu, grouped = GPUS[which], kernel == "int8_linear" and bool(gated)
        blocks = min(N // 2 if gated else N, gpu[1])
        product = Product(T, N, K, itemsize, blocks, bool(normed), bool(residual), bool(gated) and not grouped)
        found = made(kernel, product, gpu, grouped)
        assert (found and [*found[0]]) == numbers, (gpu, product)


def test_tiles_are_those_that_were_measured():
    for which, T, N, K, residual, log, numbers in MEASURED["wgmma_linear"]:
        found = made("wgmma_linear", Product(T, N, K, 2, 1, residual=bool(residual)), GPUS[which], log=log)
        assert (found and [*found[0]]) == numbers, (which, T, N, K)


def test_layers_are_those_that_were_measured():
    for which, T, A, C, F, N, gated, num_linears, numbers in MEASURED["vector_layer"]:
        found = layer.plan(T, layer.Sizes(A, C, F, N, bool(gated)), num_linears, Limits(*GPUS[which]))
        ours = found and [plan.odd_stride(64 * found.most_chunks), found.num_stages, found.shared_bytes]
        assert ours == numbers, (which, T, A, C, F, N)


@pytest.mark.parametrize("kernel", MOST_TOKENS)
def test_a_launcher_takes_each_plan_and_none_without_the_room_for_it(accepts, kernel):
    """With any number gone, negative or huge, or fewer bytes than the ring holds, it refuses."""
    draw, num_plans = random.Random(0), 0
    for _ in range(1500):
        gpu, T = draw.choice(GPUS), draw.randint(1, MOST_TOKENS[kernel])
        N, K = draw.randint(1, draw.choice((300, 20_000))), 16 * draw.randint(1, draw.choice((32, 256, 2048)))
        normed, residual = draw.random() < 0.5 and kernel != "wgmma_linear", draw.random() < 0.5
        gated = kernel in ("linear", "vector_linear") and N > 1 and draw.random() < 0.3
        N += gated and N % 2
        grouped, log = (
            draw.random() < 0.5 and not (kernel == "register_linear" and normed),
            draw.choice((None, 0, 1, 2)),
        )
        itemsize = draw.choice((2, 4)) if kernel in ("linear", "int8_linear") and not gated else 2
        product = Product(T, N, K, itemsize, min(N // 2 if gated else N, gpu[1]), normed, residual, gated)
        found = made(kernel, product, gpu, grouped, log)
        if found is None:
            continue
        num_plans += 1
        numbers, ring = found[0]._asdict(), found[1]
        if kernel == "register_linear":
            numbers["at_once"] = plan.at_once(ring, is_paced=draw.random() < 0.5)
        if kernel == "vector_linear":
            numbers["stride"] = product.stride
        assert accepts(kernel, product, numbers.values(), grouped), (gpu, product, numbers)
        room = ring.num_stages * (ring.stage_bytes + plan.BARRIER_BYTES)
        wrongs = [(name, wrong) for name in numbers for wrong in (0, -64, 1 << 30) if numbers[name] != wrong]
        for name, wrong in [*wrongs, ("shared_bytes", room - 1)]:
            told = (numbers | {name: wrong}).values()
            assert (name, wrong) in FREE or not accepts(kernel, product, told, grouped), (gpu, product, name, wrong)
    assert num_plans > 500


def test_a_norm_and_odd_halves_are_not_divided(accepts):
    product = Product(8, 1600, 1600, 2, 66, residual=True)
    found, ring = plan.register(product, GPUS[-1][0], divided=True)
    told = (*found, plan.at_once(ring, is_paced=True))
    assert accepts("register_linear", product, told, True)
    assert not accepts("register_linear", product._replace(normed=True), told, True), "a norm needs all inputs"
    assert not accepts("register_linear", product._replace(K=1592), told, True), "a copy is 16 bytes"
