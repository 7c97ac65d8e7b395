"""The plans in Python are those that csrc/ makes, number by number."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

from host_code import compiled

from eet_lab.models.config import PRESETS
from eet_lab.ops.cuda import layer, plan
from eet_lab.ops.cuda.launching import Limits
from eet_lab.ops.cuda.plan import Product
from linears.sources import GPU, GPUS

ARGS = """
template <typename Args>
static Args made(int T, int N, int K, int norm, int residual, int gated, int blocks) {
  static const char one[8] = {};
  Args a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, residual ? one : nullptr, norm ? one : nullptr, nullptr,
         T, N, K, 0, 0.f, blocks);
  if (gated) a.pair(blocks);
  return a;
}
"""
SIGNATURE = "(int T, int N, int K, int itemsize, int blocks, int norm, int residual, int gated, int* found)"
TILES = (
    GPU
    + '#include "linear.cu"'
    + ARGS
    + f"""
template <typename T>
static int tiles{SIGNATURE} {{
  auto a = made<eet::TileArgs<T, T>>(T_, N, K, norm, residual, gated, blocks);
  const int stride = eet::odd_stride(K * sizeof(T)) / sizeof(T);
  const int bytes = T_ <= 4 ? eet::plan_tiles<4>(a, stride, 32, true)
                  : T_ <= 8 ? eet::plan_tiles<8>(a, stride, 32, true) : eet::plan_tiles<16>(a, stride, 32, true);
  const int all[] = {{a.stride, a.stage_rows, a.stage_inputs, a.num_stages}};
  for (int i = 0; i < 4; ++i) found[i] = all[i];
  return bytes;
}}
""".replace("int T,", "int T_,")
    + f"""
extern "C" int numbers_of{SIGNATURE} {{
  return itemsize == 2 ? tiles<__half>(T, N, K, itemsize, blocks, norm, residual, gated, found)
                       : tiles<float>(T, N, K, itemsize, blocks, norm, residual, gated, found);
}}
"""
)
INT8 = (
    GPU
    + '#include "int8_linear.cu"'
    + ARGS
    + f"""
template <typename T>
static int tiles{SIGNATURE} {{
  auto a = made<Int8Args<T>>(T_, N, K, norm, residual, 0, blocks);
  const int stride = row_stride<T>(K), few = gated ? 0 : 3;  // gated: grouped
  const int bytes = T_ <= few ? eet::plan_tiles<4>(a, stride, kInt8Chunk, true)
                  : T_ <= 8 ? eet::plan_tiles<8>(a, stride, kInt8Chunk, false)
                            : eet::plan_tiles<16>(a, stride, kInt8Chunk, true);
  const int all[] = {{a.stride, a.stage_rows, a.stage_inputs, a.num_stages}};
  for (int i = 0; i < 4; ++i) found[i] = all[i];
  return bytes;
}}
""".replace("int T,", "int T_,")
    + f"""
extern "C" int numbers_of{SIGNATURE} {{
  return itemsize == 2 ? tiles<__half>(T, N, K, itemsize, blocks, norm, residual, gated, found)
                       : tiles<float>(T, N, K, itemsize, blocks, norm, residual, gated, found);
}}
"""
)
STEPS = f"""
extern "C" int numbers_of{SIGNATURE} {{
  auto a = made<ARGS<__half>>(T, N, K, norm, residual, gated, blocks);
  const int bytes = plan(a);
  const int all[] = {{a.steps.num, a.tile, a.stage_stride, a.num_stages, a.num_tiles}};
  for (int i = 0; i < 5; ++i) found[i] = all[i];
  return bytes;
}}
"""
VECTOR = GPU + '#include "vector_linear.cu"' + ARGS + STEPS.replace("ARGS", "VectorArgs")
REGISTER = GPU + '#include "register_linear.cu"' + ARGS + STEPS.replace("ARGS", "RegisterArgs")
WGMMA = (
    GPU
    + '#include "wgmma_linear.cu"'
    + ARGS
    + """
extern "C" int numbers_of(int T, int N, int K, int residual, int log_cluster, int* found) {
  auto a = made<WgmmaArgs<__half>>(T, N, K, 0, residual, 0, 1);
  const int clusters = divide(a, log_cluster, [](int log) { return num_processors >> log; });
  if (!clusters) return 0;
  const int bytes = a.tile <= kTileRows ? (T <= 32 ? plan<32, 1>(a) : plan<64, 1>(a))
                                        : (T <= 32 ? plan<32, 2>(a) : plan<64, 2>(a));
  const int all[] = {clusters, a.log_cluster, a.tile, a.num_stages, a.sums_at, a.held_at, a.barriers_at};
  for (int i = 0; i < 7; ++i) found[i] = all[i];
  return bytes;
}
"""
)
LAYER = (
    GPU
    + '#include "vector_layer.cu"'
    + """
extern "C" int numbers_of(int T, int A, int C, int F, int N, int gated, int copies, int blocks, int num_phases,
                          int* found) {
  const auto phase = [&](int outputs, int inputs) {
    return Phase<__half>{{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, T, outputs,
                          inputs, 0, 0.f, blocks}, 0, 0};
  };
  LayerArgs<__half> a{{phase(C, A), phase(gated ? 2 * F : F, C), phase(C, F), phase(N, C)}, num_phases, T, 0, 0,
                      {nullptr, nullptr, 0, copies}};
  if (gated) a.phase[1].pair(blocks);
  const int bytes = plan(a);
  found[0] = a.stage_rows, found[1] = a.stage_stride, found[2] = a.num_stages, found[3] = a.phase[1].tile;
  return bytes;
}
"""
)
ONE_STAGE = (3, 7168, 28672), (16, 1280, 5120), (1, 8192, 32768), (8, 1600, 6400), (1, 4096, 49152), (4, 4096, 24576)


def sizes(draw: random.Random, most_T: int, num: int, unit: int = 8):
    """T, N, K: of every preset, then edges, then any."""
    for config in PRESETS.values():
        C, F, V = config.hidden_size, config.ffn_size, config.vocab_size
        for N, K in ((3 * C, C), (C, C), (F, C), (2 * F, C), (C, F), (V, C)):
            for T in {1, 2, 3, 4, 5, 8, 9, 16, 32, 64}:
                if most_T >= T:
                    yield T, N, K
    yield from ((T, N, K) for T, N, K in ONE_STAGE if most_T >= T)
    yield from ((T, 1, unit) for T in range(1, most_T + 1))
    for _ in range(num):
        most = draw.choice((512, 4096, 65_536))
        yield (
            draw.randint(1, most_T),
            draw.randint(1, draw.choice((300, 20_000, 60_000))),
            unit * draw.randint(1, most // unit),
        )


def library_of(folder: Path, source: str) -> ctypes.CDLL:
    return compiled(folder, source)


def same(library, most_T: int, num: int, tell, itemsizes=(2, 4), unit: int = 8, gates: bool = True) -> int:
    """How many plans there were; all are what `tell(product, shared_bytes, gated)` says."""
    draw, num_plans = random.Random(0), 0
    found = (ctypes.c_int * 8)()
    for gpu in GPUS:
        library.set_gpu(*gpu)
        for T, N, K in sizes(draw, most_T, num, unit):
            for itemsize in itemsizes:
                norm, residual, gated = draw.choice((0, 1)), draw.choice((0, 1)), int(gates and draw.random() < 0.3)
                N += gated and N % 2
                blocks = min(N // 2 if gated else N, gpu[1])
                num_bytes = library.numbers_of(T, N, K, itemsize, blocks, norm, residual, gated, found)
                ours = tell(Product(T, N, K, itemsize, blocks, bool(norm), bool(residual), bool(gated)), gpu[0])
                if not num_bytes:
                    assert ours is None, (gpu, T, N, K, itemsize, norm, residual, gated, ours)
                    continue
                num_plans += 1
                assert ours is not None, (gpu, T, N, K, itemsize, norm, residual, gated)
                theirs = (*found[: len(ours[0]) - 1], num_bytes)
                assert ours[0] == theirs, (gpu, T, N, K, itemsize, norm, residual, gated)
    return num_plans


def test_of_linear(tmp_path):
    assert same(library_of(tmp_path, TILES), 16, 3000, plan.tiles) > 10_000


def test_of_int8_linear(tmp_path):
    def tell(product, shared_bytes):
        return plan.tiles(product._replace(gated=False), shared_bytes, int8=True, grouped=product.gated)

    library = library_of(tmp_path, INT8)
    assert same(library, 16, 3000, tell, unit=16) > 10_000


def test_of_vector_linear(tmp_path):
    assert same(library_of(tmp_path, VECTOR), 4, 3000, plan.vector, (2,)) > 5000


def test_of_register_linear(tmp_path):
    assert same(library_of(tmp_path, REGISTER), 8, 3000, plan.register, (2,), gates=False) > 4000


def test_of_wgmma_linear(tmp_path):
    draw, library, found, num_plans = random.Random(0), library_of(tmp_path, WGMMA), (ctypes.c_int * 8)(), 0
    for gpu in GPUS:
        library.set_gpu(*gpu)
        for T, N, K in sizes(draw, 64, 3000):
            residual, log = draw.choice((0, 1)), draw.choice((None, None, 0, 1, 2))
            num_bytes = library.numbers_of(T, N, K, residual, -1 if log is None else log, found)
            most = tuple(gpu[1] >> i for i in range(3))
            ours = plan.clusters(Product(T, N, K, 2, 1, residual=bool(residual)), gpu[0], most, log)
            if not num_bytes:
                assert ours is None, (gpu, T, N, K, residual, log)
                continue
            num_plans += 1
            assert ours is not None and ours[0] == (*found[:7], num_bytes), (gpu, T, N, K, residual, log)
    assert num_plans > 5000


def test_of_vector_layer(tmp_path):
    draw, library, found, num_plans = random.Random(0), library_of(tmp_path, LAYER), (ctypes.c_int * 8)(), 0
    known = []
    for c in PRESETS.values():
        D = c.spec.head_dim
        N = (c.num_heads + 2 * (c.num_kv_heads or c.num_heads)) * D
        known.append(layer.Sizes(c.num_heads * D, c.hidden_size, c.ffn_size, N, c.act == "swiglu"))
    known += [
        layer.Sizes(C, C, 4 * C, 3 * C, False)
        for C in (*range(8, 2000, 184), 1600, 2048, 2560, 4096, 5120, 8192, 12288)
    ]
    known += [layer.Sizes(*(8 * draw.randint(1, 1200) for _ in range(4)), draw.random() < 0.5) for _ in range(1000)]
    for gpu in GPUS:
        library.set_gpu(*gpu)
        for each in known:
            for T in (1, 2):
                for num_linears in (3, 4):
                    limits = Limits(*gpu)
                    blocks = layer._num_blocks(each.C, each.F, limits)
                    copies = layer._copies(T, each, blocks)
                    ours = layer.plan(T, each, num_linears, limits)
                    num_bytes = library.numbers_of(T, *each, max(1, copies), blocks, num_linears, found)
                    if not num_bytes or not copies:
                        assert ours is None, (gpu, T, each)
                        continue
                    num_plans += 1
                    assert ours is not None, (gpu, T, each)
                    stage_rows, stage_stride, num_stages, fc_1_tile = found[:4]
                    most = layer._of_a_block(each.fc_1_rows, each, blocks)
                    assert (ours.num_stages, ours.shared_bytes) == (num_stages, num_bytes), (gpu, T, each)
                    assert layer.odd_stride(64 * ours.most_chunks) == stage_stride
                    assert plan.ceil(most, plan.ceil(most, ours.most_rows)) == fc_1_tile <= stage_rows <= ours.most_rows
    assert num_plans > 500
