"""How a launch cuts its weights into stages: none without inputs, none too long for registers, and all of it fits."""

from __future__ import annotations

import ctypes
import random
from math import ceil

import pytest

from eet_lab.ops.cuda import int8, linear
from eet_lab.ops.int8_cases import ONE_STAGE
from linears.sources import GPUS


@pytest.mark.parametrize("room", [43 * 1024, 99 * 1024, 108 * 1024, 116 * 1024, 226 * 1024])
def test_stages_cover_all_inputs_and_no_stage_is_empty(library, room):
    draw, num_cut = random.Random(room), 0
    widths = [*range(8, 33_000, 264), *(256 * draw.randint(1, 128) for _ in range(200)), 1600, 6400, 22528, 30720]
    for K in widths:
        T, norm, N, blocks = draw.choice((1, 2, 3, 4)), draw.choice((0, 1)), draw.choice((132, 1600, 50257)), 132
        for least_copy in (1920, 128):
            found = (ctypes.c_int * 7)()
            num_bytes = library.cut_of(T, N, K, norm, blocks, room, least_copy, found)
            steps, chunks, more, tile, stride, stages, tiles = found
            if not num_bytes:
                continue
            num_cut += 1
            most = chunks + (more > 0)
            assert steps * chunks + more == ceil(K / 32) and more < steps, f"{T} x {K}: {steps} steps"
            assert chunks > 0 and most <= 8 * 8, "a warp keeps eight chunks"
            assert 0 < num_bytes <= room
            assert most * 64 <= stride
            assert stages * (tile * stride + 16) + 4 * tiles * steps * 8 * 8 * T <= num_bytes
            assert 0 < stages <= ceil(ceil(N / blocks) / tile) * steps
    assert num_cut > 50


def test_only_a_warps_last_chunk_may_lie_behind_the_end_of_a_step(library):
    """Chunk i of a warp is chunk 8 i + warp of a step: all but the last i are looked at without a question."""
    draw = random.Random(0)
    for K in (8, 64, 1000, 1600, 2056, 6408, 22528, 65_544, *(8 * draw.randint(1, 9000) for _ in range(500))):
        for num_steps in {ceil(ceil(K / 32) / 64), min(ceil(K / 32), draw.randint(1, 40))}:
            if ceil(K / 32) > 64 * num_steps:
                continue
            found = (ctypes.c_int * num_steps)()
            library.inputs_of(K, num_steps, found)
            assert sum(found) == K and min(found) > 0, (K, num_steps, list(found))
            each = ceil(max(ceil(inputs / 32) for inputs in found) / 8)
            assert all(inputs >= (each - 1) * 8 * 32 for inputs in found), (K, num_steps, list(found))


def test_activations_fit_in_a_warps_registers(register_library):
    library, draw, num_cut = register_library, random.Random(0), 0
    for _ in range(3000):
        T, norm, blocks = draw.randint(1, 8), draw.choice((0, 1)), draw.choice((8, 108, 132))
        N, K = draw.randint(blocks, 64 * blocks), 8 * draw.randint(1, draw.choice((256, 2048)))
        room = draw.choice((48, 99, 108, 116, 226)) * 1024
        found = (ctypes.c_int * 7)()
        num_bytes = library.cut_of(T, N, K, norm, blocks, room, found)
        steps, chunks, more, tile, stride, stages, tiles = found
        if not num_bytes:
            continue
        num_cut += 1
        most = chunks + (more > 0)
        assert steps * chunks + more == ceil(K / 32) and most * 64 <= stride
        assert most <= 8 * (8 if steps == 1 else 4), "a warp keeps eight chunks, or four and the next four"
        assert steps == 1 or not norm
        assert 0 < stages <= tiles * steps and tiles * tile >= ceil(N / blocks)
        sums, norms = 4 * tiles * 8 * (8 * T + 1), norm * (1024 + 4 * K)
        assert sums + norms + stages * (tile * stride + 16) <= num_bytes <= room
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
def test_int8_weights_are_streamed_wherever_that_fits(int8_library, gpu):
    """Else they would be expanded, which costs five times the traffic."""
    draw, num_few = random.Random(gpu[1]), 0
    int8_library.set_gpu(*gpu)
    for _ in range(4000):
        T, C, normed = draw.randint(1, 16), 16 * draw.randint(1, draw.choice((64, 700, 4096))), draw.choice((0, 1))
        few = int8.takes_few(T, C, 2, bool(normed), gpu[0])
        num_few += few
        for grouped in (False, True):
            found = (ctypes.c_int * 2)()
            num_bytes = int8_library.plan_of(T, gpu[1] * 16, C, normed, 1 + grouped, gpu[1], found)
            if few:
                assert 0 < num_bytes <= gpu[0] - 1024, (T, C, normed)
            elif grouped or T > 3:
                assert not num_bytes, (T, C, normed)
    assert 1000 < num_few < 3500


def test_cases_have_rings_of_one_stage(int8_library):
    for shape, blocks in zip(ONE_STAGE, (132, 132, 8), strict=True):
        int8_library.set_gpu(GPUS[-1][0], blocks)
        found = (ctypes.c_int * 2)()
        assert int8_library.plan_of(shape.T, shape.N, shape.C, 1, 1 + bool(shape.group), blocks, found), shape
        assert found[0] == 1 < ceil(shape.C / 2048), shape


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


def test_tiles_have_stages_that_stay_with_their_warpgroup(wgmma_library):
    """Two take turns: so a ring that goes round has an even number of stages, two for each."""
    draw, sizes = random.Random(0), [(32, 1600, 6400), (64, 50257, 1600), (17, 96, 64), (40, 8, 8)]
    sizes += [(draw.randint(9, 64), draw.randint(1, 60_000), 8 * draw.randint(1, 2048)) for _ in range(2000)]
    wgmma_library.set_gpu(*GPUS[-1])
    clusters_of = set()
    for T, N, K in sizes:
        residual, log = draw.choice((0, 1)), draw.choice((-1, -1, 0, 1, 2))
        found = (ctypes.c_int * 11)()
        num_bytes = wgmma_library.plan_of(T, N, K, residual, log, found)
        clusters, log_cluster, tile, share, rest, stages, stage_bytes, sums_at, sums, held_at, barriers_at = found
        if num_bytes < 0:
            assert log > 0, "a cluster has a tile of 64 outputs, and a step of the inputs for each block"
            continue
        clusters_of.add(log_cluster)
        assert 0 < num_bytes <= GPUS[-1][0] - 1024, (T, N, K)
        assert clusters * share + rest == N and rest < clusters <= GPUS[-1][1] >> log_cluster
        tiles, steps = ceil((share + (rest > 0)) / tile), ceil(ceil(K / 64) / (1 << log_cluster))
        assert tile <= 128 and (log_cluster == 0 or (tiles == 1 and tile <= 64))
        assert stages == tiles * steps or (stages % 2 == 0 and stages >= 4), (T, N, K, stages)
        ring = stages * stage_bytes
        assert sums_at >= ring or tiles == 1, "sums of a tile, while the next one arrives"
        assert ring <= held_at and sums_at + sums <= held_at
        held = 2 * tile * (1 + residual * ceil(T / (1 << log_cluster)))
        assert held_at + held <= barriers_at and barriers_at + 16 * stages <= num_bytes
        rows, tokens = (64 if tile <= 64 else 128), (32 if T <= 32 else 64)
        last = ring - stage_bytes  # whose products read whole tiles
        assert last + max(128 * rows, 128 * (8 * ceil(tile / 8) + tokens)) <= num_bytes
    assert clusters_of == {0, 1, 2}


def test_inputs_are_divided_where_a_block_would_have_few_outputs(wgmma_library):
    """QKV, projection, FC1 and FC2 of XL, and its head: blocks of a cluster, as a power of two, as was fastest."""
    sizes, found = [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400), (50257, 1600)], (ctypes.c_int * 11)()
    wgmma_library.set_gpu(*GPUS[-1])
    for T in (17, 32, 64):
        told = [wgmma_library.plan_of(T, N, K, N == 1600, -1, found) and found[1] for N, K in sizes]
        assert told == [0, 1, 0, 2, 0], T
