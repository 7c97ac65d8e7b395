"""How vector_linear.cu cuts a layer into stages: what fills the ring and what empties it must count them alike."""

from __future__ import annotations

import ctypes
import random
import subprocess

import pytest

from eet_lab.ops.native import toolchain
from eet_lab.paths import csrc_dir

SOURCE = """
#include "vector_linear.cu"
extern "C" int cut_of(int T, int N, int K, int norm, int blocks, int room, int least_copy, int* found) {
  static const __half one[1] = {};
  VectorArgs<__half> a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, norm ? one : nullptr, nullptr, T,
                       N, K, 0, 0.f, blocks);
  a.stride = eet::odd_stride(K * 2) / 2;
  const int bytes = cut(a, room, least_copy);
  const int all[] = {a.steps, a.stage_inputs, a.tile, a.stage_stride, a.num_stages, a.num_tiles};
  for (int i = 0; i < 6; ++i) found[i] = all[i];
  return bytes;
}
"""


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    source, library = folder / "cut.cu", folder / "cut.so"
    source.write_text(SOURCE)
    nvcc = str(toolchain.find_nvcc())
    flags = ["-std=c++17", "-shared", "-Xcompiler=-fPIC", "-arch=sm_90a", f"-I{csrc_dir()}"]
    subprocess.run([nvcc, *flags, "-o", library, source], check=True, capture_output=True)
    function = ctypes.CDLL(str(library)).cut_of

    def call(*numbers: int) -> tuple[int, tuple[int, ...]]:
        found = (ctypes.c_int * 6)()
        return function(*numbers, found), tuple(found)

    return call


@pytest.mark.parametrize("room", [43 * 1024, 99 * 1024, 108 * 1024, 116 * 1024, 226 * 1024])
def test_stages_cover_all_inputs_and_no_stage_is_empty(cut, room):
    draw, num_cut = random.Random(room), 0
    widths = [*range(8, 33_000, 264), *(256 * draw.randint(1, 128) for _ in range(200)), 1600, 6400, 22528, 30720]
    for K in widths:
        T, norm, N, blocks = draw.choice((1, 2)), draw.choice((0, 1)), draw.choice((132, 1600, 50257)), 132
        for least_copy in (1920, 128):
            num_bytes, (steps, inputs, tile, stride, stages, tiles) = cut(T, N, K, norm, blocks, room, least_copy)
            if not num_bytes:
                continue
            num_cut += 1
            assert steps == -(-K // inputs), f"{T} x {K}: {steps} stages of {inputs}"
            assert 0 < num_bytes <= room
            assert inputs * 2 <= stride
            assert stages * (tile * stride + 16) + 4 * tiles * steps * 8 * 4 * T <= num_bytes
            most_outputs = -(-N // blocks)
            assert stages % 4 == 0 or stages == -(-most_outputs // tile) * steps, "a place belongs to one team"
    assert num_cut > 50
