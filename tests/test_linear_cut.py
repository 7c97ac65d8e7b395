"""How a layer is cut into stages: no step without inputs, none too long for a warp's registers."""

from __future__ import annotations

import ctypes
import random
import subprocess
from math import ceil
from pathlib import Path

import pytest

from eet_lab.ops.native import toolchain
from eet_lab.paths import csrc_dir

SOURCE = """
#include "vector_linear.cu"
extern "C" void inputs_of(int K, int num_steps, int* found) {
  const eet::Steps steps = eet::cut_inputs(K, num_steps);
  for (int i = 0; i < num_steps; ++i) found[i] = steps.inputs(i, K);
}
extern "C" int cut_of(int T, int N, int K, int norm, int blocks, int room, int least_copy, int* found) {
  static const __half one[1] = {};
  VectorArgs<__half> a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, norm ? one : nullptr, nullptr, T,
                       N, K, 0, 0.f, blocks);
  a.stride = eet::odd_stride(K * 2) / 2, a.log_tokens = T > 2 ? 2 : T - 1;
  const int bytes = cut(a, room, least_copy);
  const int all[] = {a.steps.num, a.steps.chunks, a.steps.more, a.tile, a.stage_stride, a.num_stages, a.num_tiles};
  for (int i = 0; i < 7; ++i) found[i] = all[i];
  return bytes;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("cut"), SOURCE)


def compiled(folder: Path, text: str) -> ctypes.CDLL:
    source, made = folder / "cut.cu", folder / "cut.so"
    source.write_text(text)
    nvcc = str(toolchain.find_nvcc())
    flags = ["-std=c++17", "-shared", "-Xcompiler=-fPIC", "-arch=sm_90a", f"-I{csrc_dir()}"]
    subprocess.run([nvcc, *flags, "-o", made, source], check=True, capture_output=True)
    return ctypes.CDLL(str(made))


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


REGISTER_SOURCE = """
#include "register_linear.cu"
extern "C" int cut_of(int T, int N, int K, int norm, int blocks, int room, int* found) {
  static const __half one[1] = {};
  RegisterArgs<__half> a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, norm ? one : nullptr, nullptr,
                         T, N, K, 0, 0.f, blocks);
  const int bytes = cut(a, room);
  const int all[] = {a.steps.num, a.steps.chunks, a.steps.more, a.tile, a.stage_stride, a.num_stages, a.num_tiles};
  for (int i = 0; i < 7; ++i) found[i] = all[i];
  return bytes;
}
"""


def test_activations_fit_in_a_warps_registers(tmp_path):
    library, draw, num_cut = compiled(tmp_path, REGISTER_SOURCE), random.Random(0), 0
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
