"""How a launch cuts its weights into stages: none without inputs, none too long for registers, and all of it fits."""

from __future__ import annotations

import ctypes
import random
from math import ceil

import pytest

from eet_lab.ops.cuda import choice, linear, plan
from eet_lab.ops.cuda.launching import Limits
from eet_lab.ops.int8_cases import ONE_STAGE
from linears.sources import GPUS


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_stages_cover_all_inputs_and_no_stage_is_empty(gpu):
    draw, num_cut = random.Random(gpu[1]), 0
    widths = [*range(8, 33_000, 264), *(256 * draw.randint(1, 128) for _ in range(200)), 1600, 6400, 22528, 30720]
    for K in widths:
        T, N, normed, residual = (
            draw.randint(1, 4),
            draw.choice((132, 1600, 50257)),
            *(draw.choices((False, True), k=2)),
        )
        found = plan.vector(plan.Product(T, N, K, 2, gpu[1], normed, residual), gpu[0])
        if found is None:
            continue
        steps, tile, stride, stages, tiles, num_bytes = found[0]
        num_cut += 1
        chunks, more = divmod(ceil(K / 32), steps)
        most = chunks + (more > 0)
        assert chunks > 0 and most <= 8 * 8, "a warp keeps eight chunks"
        assert 0 < num_bytes <= gpu[0] - 1024
        assert most * 64 <= stride
        assert stages * (tile * stride + 16) + 4 * tiles * steps * 8 * 8 * T <= num_bytes
        assert 0 < stages <= ceil(ceil(N / gpu[1]) / tile) * steps
    assert num_cut > 50


def test_only_a_warps_last_chunk_may_lie_behind_the_end_of_a_step(checks):
    """Chunk i of a warp is chunk 8 i + warp of a step: all but the last i are looked at without a question."""
    draw = random.Random(0)
    for K in (8, 64, 1000, 1600, 2056, 6408, 22528, 65_544, *(8 * draw.randint(1, 9000) for _ in range(500))):
        for num_steps in {ceil(ceil(K / 32) / 64), min(ceil(K / 32), draw.randint(1, 40))}:
            if ceil(K / 32) > 64 * num_steps:
                continue
            found = (ctypes.c_int * num_steps)()
            checks.inputs_of_vector_linear(K, num_steps, found)
            assert sum(found) == K and min(found) > 0, (K, num_steps, list(found))
            each = ceil(max(ceil(inputs / 32) for inputs in found) / 8)
            assert all(inputs >= (each - 1) * 8 * 32 for inputs in found), (K, num_steps, list(found))


def test_activations_fit_in_a_warps_registers():
    draw, num_cut = random.Random(0), 0
    for _ in range(3000):
        T, normed, blocks = draw.randint(1, 8), draw.random() < 0.5, draw.choice((8, 108, 132))
        N, K = draw.randint(blocks, 64 * blocks), 8 * draw.randint(1, draw.choice((256, 2048)))
        room = draw.choice((48, 99, 163, 227)) * 1024
        found = plan.register(plan.Product(T, N, K, 2, blocks, normed, draw.random() < 0.5), room)
        if found is None:
            continue
        steps, tile, stride, stages, tiles, num_bytes = found[0]
        num_cut += 1
        most = ceil(ceil(K / 32) / steps)
        assert most * 64 <= stride
        assert most <= 8 * (8 if steps == 1 else 4), "a warp keeps eight chunks, or four and the next four"
        assert steps == 1 or not normed
        assert 0 < stages <= tiles * steps and tiles * tile >= ceil(N / blocks)
        sums, norms = 4 * 8 * T * next(n for n in range(4, 99, 8) if n >= tiles * tile), normed * (1024 + 4 * K)
        assert sums + norms + stages * (tile * stride + 16) <= num_bytes <= room - 1024
    assert num_cut > 2000


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_what_is_few_fits(plans, gpu):
    draw, num_few = random.Random(gpu[1]), 0
    for _ in range(4000):
        T, normed, most = draw.randint(1, 18), draw.choice((True, False)), draw.choice((512, 4096, 65_536))
        gated, N = normed and draw.random() < 0.3, draw.randint(1, draw.choice((300, 20_000, 60_000)))
        sizes = T, N * (1 + gated), 8 * draw.randint(1, most // 8), normed, gated
        if found := plans(gpu, *sizes):
            num_bytes, stages, stage_bytes, outputs = found
            num_few += 1
            assert 0 < num_bytes <= gpu[0] - 1024 and stages > 0, sizes
            T, N, K, normed, gated = sizes
            if linear.streaming_kernel(T, N, K, 2, normed=normed, gated=gated) == "linear" and N % 8 == 0:
                assert stages > 1 or stage_bytes >= 2 * outputs * K, "one stage is multiplied while the next arrives"
    assert num_few > 1500


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_int8_weights_are_streamed_wherever_that_fits(gpu):
    """With one stage too: else they would be expanded, which costs five times the traffic."""
    draw, num_few = random.Random(gpu[1]), 0
    for _ in range(4000):
        T, C, normed = draw.randint(1, 16), 16 * draw.randint(1, draw.choice((64, 700, 4096))), draw.random() < 0.5
        for scales in (1, 4):
            few = choice.takes_int8(T, gpu[1] * 16, C, 2, normed, scales, Limits(*gpu))
            num_few += few
            held = T * (2 * ceil(C / 64) * 64 + 16) + 4 * C * normed
            stage = 16 * 64 * (ceil(ceil(C / ceil(C / 2048)) / 64) | 1) + 16
            sums = T * (512 if T > 8 else 4096 if T > 3 or scales > 1 else 2048)
            assert few == (held + stage + sums <= gpu[0] - 1024), (T, C, normed, scales)
    assert 2000 < num_few < 7500


def test_cases_have_rings_of_one_stage():
    for shape, blocks in zip(ONE_STAGE, (132, 132, 8), strict=True):
        product = plan.Product(shape.T, shape.N, shape.C, 2, blocks, normed=True)
        found = plan.tiles(product, GPUS[-1][0], int8=True, grouped=bool(shape.group))
        assert found and found[0].num_stages == 1 < ceil(shape.C / 2048), shape


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("C", [768, 1600, 2048, 2560, 4096, 5376, 8192, 8448, 10_240, 12_288, 14_080])
def test_the_ring_keeps_the_memory_busy(plans, T, C):
    """All weights of a block, or three stages and 48 KiB, wherever a block alone has room for them."""
    for N, K, normed in ((3 * C, C, True), (4 * C, C, True), (C, C, False), (C, 4 * C, False)):
        if found := plans(GPUS[-1], T, N, K, normed):
            _, stages, stage_bytes, outputs = found
            room = 226 * 1024 - 2 * K * (T + 2 * normed) - 16 * 1024
            wanted = min(48 * 1024, 2 * outputs * K)
            assert stages * stage_bytes >= min(wanted, room // 2), (T, N, K, found)


@pytest.mark.parametrize(("T", "C"), [(1, 768), (1, 1600), (8, 1600), (4, 1024), (4, 2048)])
def test_linears_of_common_models_leave_room_to_the_kernels_around_them(plans, T, C):
    sizes = [(3 * C, C, True), (C, C, False), (C, 4 * C, False)]
    found = [plans(GPUS[-1], T, *each) for each in (*sizes, (4 * C, C, True))]
    half = 228 * 512
    assert all(each[0] <= half + 2048 for each in found), found


MOST = tuple(GPUS[-1][1] >> log for log in range(3))


def test_tiles_have_stages_that_stay_with_their_warpgroup():
    """Two take turns: so a ring that goes round has an even number of stages, two for each."""
    draw, sizes = random.Random(0), [(32, 1600, 6400), (64, 50257, 1600), (17, 96, 64), (40, 8, 8)]
    sizes += [(draw.randint(9, 64), draw.randint(1, 60_000), 8 * draw.randint(1, 2048)) for _ in range(2000)]
    clusters_of = set()
    for T, N, K in sizes:
        residual, log = draw.random() < 0.5, draw.choice((None, None, 0, 1, 2))
        found = plan.clusters(plan.Product(T, N, K, 2, 1, residual=residual), GPUS[-1][0], MOST, log)
        if found is None:
            assert log, "a cluster has a tile of 64 outputs, and a step of the inputs for each block"
            continue
        (clusters, log_cluster, tile, stages, sums_at, held_at, barriers_at, num_bytes), ring = found
        clusters_of.add(log_cluster)
        assert 0 < num_bytes <= GPUS[-1][0] - 1024, (T, N, K)
        assert clusters <= GPUS[-1][1] >> log_cluster
        tiles, steps = ceil(ceil(N / clusters) / tile), ceil(ceil(K / 64) / (1 << log_cluster))
        assert tile <= 128 and (log_cluster == 0 or (tiles == 1 and tile <= 64))
        assert stages == tiles * steps or (stages % 2 == 0 and stages >= 4), (T, N, K, stages)
        held, sums = stages * ring.stage_bytes, 8 * T * (32 * ceil(tile / 32) + 4)
        assert sums_at >= held or tiles == 1, "sums of a tile, while the next one arrives"
        assert held <= held_at and sums_at + sums <= held_at
        added = 2 * tile * (1 + residual * ceil(T / (1 << log_cluster)))
        assert held_at + added <= barriers_at and barriers_at + 16 * stages <= num_bytes
        rows, tokens = (64 if tile <= 64 else 128), (32 if T <= 32 else 64)
        last = held - ring.stage_bytes  # whose products read whole tiles
        assert last + max(128 * rows, 128 * (8 * ceil(tile / 8) + tokens)) <= num_bytes
    assert clusters_of == {0, 1, 2}


def test_inputs_are_divided_where_a_block_would_have_few_outputs():
    """QKV, projection, FC1 and FC2 of XL, and its head: blocks of a cluster, as a power of two, as was fastest."""
    sizes = [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400), (50257, 1600)]
    for T in (17, 32, 64):
        products = [plan.Product(T, N, K, 2, 1, residual=N == 1600) for N, K in sizes]
        found = [plan.clusters(product, GPUS[-1][0], MOST) for product in products]
        assert [each and each[0].log_cluster for each in found] == [0, 1, 0, 2, 0], T
