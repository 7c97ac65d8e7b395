"""What Python plans for one launch of a layer, against what the launcher of vector_layer.cu has to hold."""

from __future__ import annotations

import ctypes
import random

import pytest
from host_code import compiled

from eet_lab.ops.cuda import layer
from eet_lab.ops.cuda.launching import Limits
from eet_lab.ops.cuda.layer import Sizes

SOURCE = """
#include "vector_layer.cu"
extern "C" int accepts(int T, int A, int C, int F, int N, int gated, int copies, int blocks, int num_phases,
                       const int* plan) {
  const auto phase = [&](int outputs, int inputs) {
    return Phase<__half>{{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, T, outputs,
                          inputs, 0, 0.f, blocks}, 0, 0};
  };
  LayerArgs<__half> a{{phase(C, A), phase(gated ? 2 * F : F, C), phase(C, F), phase(N, C)}, num_phases, T, 0, 0,
                      {nullptr, nullptr, 0, copies}};
  if (gated) a.phase[1].pair(blocks);
  return take_plan(a, {plan[0], plan[1], plan[2], plan[3]});
}
"""


@pytest.fixture(scope="module")
def accepts(tmp_path_factory):
    """A function (T, sizes, num_linears, gpu, plan): whether the launcher takes it."""
    library = compiled(tmp_path_factory.mktemp("plan"), SOURCE)

    def ask(T, sizes, num_linears, gpu, plan) -> bool:
        blocks = layer._num_blocks(sizes.C, sizes.F, gpu)
        told, copies = (ctypes.c_int * 4)(*plan), layer._copies(T, sizes, blocks)
        return bool(library.accepts(T, *sizes, copies, blocks, num_linears, told))

    return ask


@pytest.mark.parametrize("gpu", [Limits(227 * 1024, 132), Limits(163 * 1024, 108), Limits(99 * 1024, 84)], ids=str)
def test_what_is_planned_is_taken_and_nothing_with_less_room(accepts, gpu):
    draw, fitting = random.Random(0), 0
    channels = (*range(8, 2000, 184), 1600, 2048, 2560, 4096, 5120, 8192, 12288)
    sizes = [Sizes(C, C, 4 * C, 3 * C, False) for C in channels]
    sizes += [Sizes(*(8 * draw.randint(1, 1200) for _ in range(4)), draw.random() < 0.5) for _ in range(400)]
    for each in sizes:
        for T in (1, 2):
            if layer.plan(T, each, 4, gpu) is None:
                continue
            fitting += 1
            for num_linears in (3, 4):
                found = layer.plan(T, each, num_linears, gpu)
                assert found, "the last layer fits too"
                assert found.shared_bytes <= gpu.shared_bytes - layer.ASIDE
                assert accepts(T, each, num_linears, gpu, found)
                assert not accepts(T, each, num_linears, gpu, found._replace(shared_bytes=found.shared_bytes - 1))
                assert not accepts(T, each, num_linears, gpu, found._replace(num_stages=found.num_stages + 1))
                for name in found._fields:
                    for wrong in (0, -1, 1 << 30):
                        if (name, wrong) != ("shared_bytes", 1 << 30):  # CUDA refuses so many
                            assert not accepts(T, each, num_linears, gpu, found._replace(**{name: wrong})), (name, each)
    assert 20 < fitting < len(sizes) * 2
