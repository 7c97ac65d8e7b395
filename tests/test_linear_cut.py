"""Which kernel takes a product, and how it cuts it into stages: none without inputs, none too long for registers."""

from __future__ import annotations

import ctypes
import json
import random
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from math import ceil
from pathlib import Path

import pytest
import torch
from host_code import compiled

from eet_lab.ops import native
from eet_lab.ops.cuda import int8, linear
from eet_lab.ops.cuda.launching import Limits
from eet_lab.ops.int8_cases import ONE_STAGE

RECORDED = Path(__file__).resolve().parents[1] / "benchmarks" / "h200-kernel-choice.json"
GPU = """
#include <cuda_runtime.h>
static int shared_bytes, num_processors;  // of a GPU that is told of
static cudaError_t told(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_bytes; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_bytes + 1024; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    default: *value = num_processors;
  }
  return cudaSuccess;
}
#define cudaDeviceGetAttribute(...) told(__VA_ARGS__)
extern "C" void set_gpu(int shared, int processors) { shared_bytes = shared, num_processors = processors; }
"""

PLAN = """
extern "C" int plan_of(int T, int N, int K, int norm, int residual, int blocks, int* found) {
  static const __half one[1] = {};
  ARGS a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, residual ? one : nullptr, norm ? one : nullptr, nullptr,
         T, N, K, 0, 0.f, blocks);
  const int bytes = MAKE_PLAN;
  found[0] = a.num_stages, found[1] = STAGE_ROWS * ROW_BYTES;
  return bytes;
}
"""


def plan_source(args: str, make_plan: str, rows: str, row_bytes: str) -> str:
    return (
        PLAN.replace("ARGS", args)
        .replace("MAKE_PLAN", make_plan)
        .replace("STAGE_ROWS", rows)
        .replace("ROW_BYTES", row_bytes)
    )


STEP_BYTES = "(a.steps.most_chunks() * eet::kChunk * 2)"
SOURCE = (
    GPU
    + '#include "vector_linear.cu"'
    + plan_source("VectorArgs<__half>", "plan(a)", "a.tile", STEP_BYTES)
    + """
extern "C" void inputs_of(int K, int num_steps, int* found) {
  const eet::Steps steps = eet::cut_inputs(K, num_steps);
  for (int i = 0; i < num_steps; ++i) found[i] = steps.inputs(i, K);
}
extern "C" int cut_of(int T, int N, int K, int norm, int blocks, int room, int least_copy, int* found) {
  static const __half one[1] = {};
  VectorArgs<__half> a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, norm ? one : nullptr, nullptr, T,
                       N, K, 0, 0.f, blocks);
  a.stride = eet::odd_stride(K * 2) / 2, a.log_tokens = T > 2 ? 2 : T - 1;
  const int bytes = cut(a, room, least_copy).bytes;
  const int all[] = {a.steps.num, a.steps.chunks, a.steps.more, a.tile, a.stage_stride, a.num_stages, a.num_tiles};
  for (int i = 0; i < 7; ++i) found[i] = all[i];
  return bytes;
}
"""
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("cut"), SOURCE)


@pytest.fixture(scope="module")
def register_library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("register"), REGISTER_SOURCE)


@pytest.fixture(scope="module")
def tile_library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("tiles"), TILE_SOURCE)


@pytest.fixture(scope="module")
def int8_library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("int8"), INT8_SOURCE)


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


REGISTER_SOURCE = (
    GPU
    + '#include "register_linear.cu"'
    + plan_source("RegisterArgs<__half>", "plan(a)", "a.tile", STEP_BYTES)
    + """
extern "C" int cut_of(int T, int N, int K, int norm, int blocks, int room, int* found) {
  static const __half one[1] = {};
  RegisterArgs<__half> a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, norm ? one : nullptr, nullptr,
                         T, N, K, 0, 0.f, blocks);
  const int bytes = cut(a, room).bytes;
  const int all[] = {a.steps.num, a.steps.chunks, a.steps.more, a.tile, a.stage_stride, a.num_stages, a.num_tiles};
  for (int i = 0; i < 7; ++i) found[i] = all[i];
  return bytes;
}
"""
)

TILE_PLAN = """(T <= 4 ? eet::plan_tiles<4>(a, eet::odd_stride(K * 2) / 2, 32, true)
              : T <= 8 ? eet::plan_tiles<8>(a, eet::odd_stride(K * 2) / 2, 32, true)
                       : eet::plan_tiles<16>(a, eet::odd_stride(K * 2) / 2, 32, true))"""
TILE_SOURCE = (
    GPU
    + '#include "linear.cu"'
    + plan_source("eet::TileArgs<__half, __half>", TILE_PLAN, "a.stage_rows", "(a.stage_inputs * 2)")
)

INT8_PLAN = """[&](bool grouped) {
  const int stride = row_stride<__half>(K), few = grouped ? 0 : 3;
  return T <= few ? eet::plan_tiles<4>(a, stride, kInt8Chunk, true)
         : T <= 8 ? eet::plan_tiles<8>(a, stride, kInt8Chunk, false)
                  : eet::plan_tiles<16>(a, stride, kInt8Chunk, true);
}(residual == 2)"""  # 2: the weights have groups
INT8_SOURCE = (
    GPU + '#include "int8_linear.cu"' + plan_source("Int8Args<__half>", INT8_PLAN, "a.stage_rows", "a.stage_inputs")
)


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


GPUS = ((99 * 1024, 84), (163 * 1024, 108), (227 * 1024, 132))


def planned(libraries, gpu, T: int, N: int, K: int, normed: bool) -> tuple[int, int, int, int] | None:
    """Bytes of shared memory, stages of the ring, bytes of one, and outputs of a block; None: it is cuBLAS's."""
    kernel = linear.streaming_kernel(T, N, K, 2, normed=normed)
    if kernel is None:
        return None
    assert {"vector_linear": 4, "register_linear": 8, "linear": 16}[kernel] >= T, "its launcher refuses more"
    assert kernel != "register_linear" or ceil(N / linear.num_blocks(N)) <= 64
    library = libraries[kernel]
    library.set_gpu(*gpu)
    found, blocks = (ctypes.c_int * 2)(), linear.num_blocks(N)
    return library.plan_of(T, N, K, normed, not normed, blocks, found), *found, ceil(N / blocks)


@pytest.fixture
def plans(library, register_library, tile_library, monkeypatch):
    """A function (gpu, T, N, K, normed) that tells what `planned` does."""
    libraries = {"vector_linear": library, "register_linear": register_library, "linear": tile_library}

    def tell(gpu, *sizes):
        monkeypatch.setattr(linear, "gpu", lambda: Limits(*gpu))
        return planned(libraries, gpu, *sizes)

    return tell


@pytest.fixture
def h200(monkeypatch) -> None:
    monkeypatch.setattr(linear, "gpu", lambda: Limits(*GPUS[-1]))


@pytest.mark.parametrize(
    ("T", "H", "products", "head"),
    [
        (1, 768, "vector vector vector vector", "linear"),
        (1, 1600, "vector vector vector vector", "linear"),
        (3, 1600, "vector vector vector vector", "linear"),
        (8, 1600, "register register register register", "linear"),
        (12, 1600, "linear linear linear linear", "linear"),
        (16, 1600, "linear linear linear cublas", "linear"),
        (4, 2048, "vector register vector register", "linear"),
        (3, 4096, "linear vector linear register", "linear"),
        (8, 4096, "linear register linear register", "linear"),
        (1, 5120, "linear vector linear register", "vector"),
        (16, 5120, "cublas cublas cublas cublas", "linear"),
        (1, 8192, "linear vector vector register", "vector"),
        (9, 8192, "cublas linear cublas cublas", "linear"),
        (1, 12288, "vector vector vector vector", "vector"),
        (4, 12288, "vector vector vector cublas", "vector"),
        (8, 12288, "cublas cublas cublas cublas", "cublas"),
        (1, 12296, "cublas vector cublas cublas", "linear"),
        (1, 16384, "cublas vector cublas cublas", "linear"),
        (17, 1600, "cublas cublas cublas cublas", "cublas"),
    ],
)
def test_a_product_has_the_kernel_that_measurements_gave_it(h200, T, H, products, head):
    """QKV, projection, FC1 and FC2 of a layer, and the head, in 16 bits on an H200."""
    sizes = (3 * H, H, True), (H, H, False), (4 * H, H, True), (H, 4 * H, False)
    found = [linear.streaming_kernel(T, N, C, 2, normed=normed) for N, C, normed in sizes]
    found.append(linear.streaming_kernel(T, 50257, H, 2, normed=True, gathered=True))
    assert [(kernel or "cublas").removesuffix("_linear") for kernel in found] == [*products.split(), head]


@pytest.fixture(scope="module")
def timed():
    """By product, its recorded rows by column."""
    return {
        name: [dict(zip(table[0], row, strict=True)) for row in table[1:]]
        for name, table in json.loads(RECORDED.read_text()).items()
        if isinstance(table, list)
    }


def test_no_choice_is_far_from_the_fastest_that_was_recorded(h200, timed):
    """A kernel that a chain of a layer's products prefers may be slower alone, but not by much."""
    for product, rows in timed.items():
        normed = product.endswith("norm")
        for row in rows:
            T, N, C = row["T"], row["N"], row["C"]
            if "int8_linear" in row:
                kernel = "int8_linear" if int8.takes_few(T, C, 2, normed, GPUS[-1][0]) else None
            else:
                kernel = linear.streaming_kernel(T, N, C, 2, normed=normed)
            times = {name: us for name, us in row.items() if name not in "TNC" and us}
            assert (kernel or "cublas") in times, f"{(product, T, N, C)}: {kernel} does not take it"
            assert times[kernel or "cublas"] <= 1.15 * min(times.values()), (product, T, N, C, kernel, times)


@pytest.fixture
def kernel_choice(monkeypatch):
    """The script that recorded them."""
    monkeypatch.syspath_prepend(str(RECORDED.parent))
    return import_module("kernel_choice")


def test_the_script_times_the_sizes_that_were_recorded(timed, kernel_choice):
    for name, rows in timed.items():
        product = kernel_choice.PRODUCTS[name]
        assert list(rows[0]) == product.columns
        sizes = [(T, *size) for size in product.sizes for T in product.tokens]
        assert [(row["T"], row["N"], row["C"]) for row in rows] == sizes


@pytest.mark.parametrize("name", ["residual", "norm", "int8_residual", "int8_norm"])
def test_the_script_times_one_kernel_at_a_time(kernel_choice, name, monkeypatch):
    """On the CPU, where what would be launched is noted, and cuBLAS is PyTorch's product."""
    launched, timed = [], []

    class Launchers:
        def __getattr__(self, name):
            return lambda *given: launched.append(name.removeprefix("eet_"))

    def replay_us(graph):
        timed.append({*launched} - {"dequantize", "norm", "epilogue"})
        launched.clear()
        return 1.0

    monkeypatch.setattr(native, "loaded", lambda name: Launchers())
    for module in ("linear", "int8", "norm"):
        monkeypatch.setattr(import_module(f"eet_lab.ops.cuda.{module}"), "stream_of", lambda x: 0)
    monkeypatch.setattr(kernel_choice, "random", lambda *shape: torch.randn(*shape, dtype=torch.float16))
    monkeypatch.setattr(kernel_choice, "LEAST_BYTES", 1)
    monkeypatch.setattr(kernel_choice, "_replay_us", replay_us)
    for part in ("synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, part, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    product = replace(kernel_choice.PRODUCTS[name], sizes=((48, 64),), tokens=(3,))
    [row] = product.rows()
    assert len(row) == len(product.columns)
    own = [{kernel} for kernel in product.kernels if kernel != "cublas"]
    assert [found for found in timed if found] == own
    assert len(timed) == kernel_choice.REPLAYS * len(product.kernels)


def test_what_the_script_writes_is_json(kernel_choice):
    tables = {"b": [["T", "x"], [1, None]], "c": [["T"]]}
    assert json.loads(kernel_choice.told({"a": 1}, tables)) == {"a": 1} | tables


def test_blocks_of_many_weights_are_a_range(h200):
    """Of 132 multiprocessors and 4,096 channels: 280 KB of weights a block are 35 outputs, 3 MB are 384."""
    found = [linear.streaming_kernel(2, 132 * outputs, 4096, 2, normed=True) for outputs in (34, 35, 383, 384)]
    assert found == ["vector_linear", "linear", "linear", "vector_linear"]
    assert linear.streaming_kernel(2, 132 * 35, 4096, 2, normed=False) == "vector_linear"
    assert linear.streaming_kernel(2, 132 * 35, 4096, 4, normed=True) == "linear", "in fp32 there is no other"


def test_rows_that_lie_apart_stay_out_of_registers(h200):
    of_five = [linear.streaming_kernel(5, 500, 64, 2, normed=True, gathered=gathered) for gathered in (False, True)]
    assert of_five == ["register_linear", "linear"]


def test_inputs_are_as_many_as_were_measured(h200):
    for K, N, kernel in ((49_152, 8, "register_linear"), (49_160, 8, None), (49_160, 9, "linear")):
        assert linear.streaming_kernel(1, N, K, 2, normed=False) == kernel


def test_vectors_are_streamed_where_only_their_kernel_has_room(monkeypatch):
    monkeypatch.setattr(linear, "gpu", lambda: Limits(*GPUS[0]))
    assert linear.streaming_kernel(1, 84 * 50, 4096, 2, normed=True) == "linear"
    assert linear.streaming_kernel(2, 84 * 50, 4096, 2, normed=True) == "vector_linear"


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_what_is_few_fits(plans, gpu):
    draw, num_few = random.Random(gpu[1]), 0
    for _ in range(4000):
        T, normed, most = draw.randint(1, 18), draw.choice((True, False)), draw.choice((512, 4096, 65_536))
        sizes = T, draw.randint(1, draw.choice((300, 20_000, 60_000))), 8 * draw.randint(1, most // 8), normed
        if found := plans(gpu, *sizes):
            num_bytes, stages, stage_bytes, outputs = found
            num_few += 1
            assert 0 < num_bytes <= gpu[0] - 1024 and stages > 0, sizes
            T, N, K, normed = sizes
            if linear.streaming_kernel(T, N, K, 2, normed=normed) == "linear" and N % 8 == 0:
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
