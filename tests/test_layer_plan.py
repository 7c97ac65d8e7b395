"""What Python says fits into one launch, against what the launcher of vector_layer.cu plans."""

from __future__ import annotations

import random

import pytest
from host_code import compiled

from eet_lab.ops.cuda import layer
from eet_lab.ops.cuda.launching import Limits

SOURCE = """
#include <cuda_runtime.h>
static int shared_bytes;
static cudaError_t pretend(int* value, cudaDeviceAttr, int) { return *value = shared_bytes, cudaSuccess; }
#define cudaDeviceGetAttribute pretend
#include "vector_layer.cu"
extern "C" int plan_of(int shared, int T, int C, int F, int N, int copies, int blocks, int num_phases) {
  shared_bytes = shared;
  const auto phase = [&](int outputs, int inputs) {
    return Phase<__half>{{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, T, outputs,
                          inputs, 0, 0.f, blocks}, 0, 0};
  };
  LayerArgs<__half> a{{phase(C, C), phase(F, C), phase(C, F), phase(N, C)}, num_phases, T, 0, 0,
                      {nullptr, nullptr, 0, copies}};
  return plan(a);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("plan"), SOURCE)


@pytest.mark.parametrize("gpu", [Limits(227 * 1024, 132), Limits(163 * 1024, 108), Limits(99 * 1024, 84)], ids=str)
def test_what_is_said_to_fit_is_planned_and_nothing_else(library, gpu):
    draw, fitting = random.Random(gpu.num_blocks), 0
    sizes = [(C, 4 * C, 3 * C) for C in (*range(8, 2000, 184), 1600, 2048, 2560, 4096, 5120, 8192, 12288)]
    sizes += [tuple(8 * draw.randint(1, 1200) for _ in range(3)) for _ in range(400)]
    for C, F, N in sizes:
        for T in (1, 2):
            fits, blocks = layer._fits(T, C, F, N, gpu), layer._num_blocks(C, F, gpu)
            copies = layer._copies(T, C, F, N, blocks)
            planned = library.plan_of(gpu.shared_bytes, T, C, F, N, max(1, copies), blocks, 4)
            assert fits == (copies > 0 and planned > 0), (T, C, F, N, planned)
            assert planned <= gpu.shared_bytes - 1024
            if fits:
                assert library.plan_of(gpu.shared_bytes, T, C, F, N, copies, blocks, 3) > 0, "the last layer fits too"
            fitting += fits
    assert 20 < fitting < len(sizes) * 2
