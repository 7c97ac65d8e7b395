"""What Python says fits into one launch, against what the launcher of vector_layer.cu plans."""

from __future__ import annotations

import random

import pytest
from host_code import compiled

from eet_lab.ops.cuda import layer
from eet_lab.ops.cuda.launching import Limits
from eet_lab.ops.cuda.layer import Sizes

SOURCE = """
#include <cuda_runtime.h>
static int shared_bytes;
static cudaError_t pretend(int* value, cudaDeviceAttr, int) { return *value = shared_bytes, cudaSuccess; }
#define cudaDeviceGetAttribute pretend
#include "vector_layer.cu"
extern "C" int plan_of(int shared, int T, int A, int C, int F, int N, int gated, int copies, int blocks,
                       int num_phases) {
  shared_bytes = shared;
  const auto phase = [&](int outputs, int inputs) {
    return Phase<__half>{{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, T, outputs,
                          inputs, 0, 0.f, blocks}, 0, 0};
  };
  LayerArgs<__half> a{{phase(C, A), phase(gated ? 2 * F : F, C), phase(C, F), phase(N, C)}, num_phases, T, 0, 0,
                      {nullptr, nullptr, 0, copies}};
  if (gated) a.phase[1].pair(blocks);
  return plan(a);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("plan"), SOURCE)


@pytest.mark.parametrize("gpu", [Limits(227 * 1024, 132), Limits(163 * 1024, 108), Limits(99 * 1024, 84)], ids=str)
def test_what_is_said_to_fit_is_planned_and_nothing_else(library, gpu):
    draw, fitting = random.Random(gpu.num_blocks), 0
    channels = (*range(8, 2000, 184), 1600, 2048, 2560, 4096, 5120, 8192, 12288)
    sizes = [Sizes(C, C, 4 * C, 3 * C, False) for C in channels]
    sizes += [Sizes(*(8 * draw.randint(1, 1200) for _ in range(4)), draw.random() < 0.5) for _ in range(400)]
    for its_sizes in sizes:
        for T in (1, 2):
            fits, blocks = layer._fits(T, its_sizes, gpu), layer._num_blocks(its_sizes.C, its_sizes.F, gpu)
            copies = layer._copies(T, its_sizes, blocks)
            planned = library.plan_of(gpu.shared_bytes, T, *its_sizes, max(1, copies), blocks, 4)
            assert fits == (copies > 0 and planned > 0), (T, its_sizes, planned)
            assert planned <= gpu.shared_bytes - 1024
            if fits:
                its_last = library.plan_of(gpu.shared_bytes, T, *its_sizes, copies, blocks, 3)
                assert its_last > 0, "the last layer fits too"
            fitting += fits
    assert 20 < fitting < len(sizes) * 2
