"""The plans of linear launches as C++ that a test compiles, and the GPUs that they are made for."""

from __future__ import annotations

GPUS = ((99 * 1024, 84), (163 * 1024, 108), (227 * 1024, 132))
"""Shared memory that a block can have, and multiprocessors; the last is an H200."""

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
  if (norm == 2) a.pair(blocks);  // gates, each beside what it lets through
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
VECTOR_SOURCE = (
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


REGISTER_SOURCE = (
    GPU
    + '#include "register_linear.cu"'
    + plan_source("RegisterArgs<__half>", "plan(a)", "a.tile", STEP_BYTES)
    + """
extern "C" int cut_of(int T, int N, int K, int norm, int blocks, int room, int* found) {
  static const __half one[1] = {};
  RegisterArgs<__half> a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, norm ? one : nullptr, nullptr,
                         T, N, K, 0, 0.f, blocks);
  if (norm == 2) a.pair(blocks);  // gates, each beside what it lets through
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

WGMMA_SOURCE = (
    GPU
    + '#include "wgmma_linear.cu"'
    + """
extern "C" int plan_of(int T, int N, int K, int residual, int log_cluster, int* found) {
  static const __half one[1] = {};
  WgmmaArgs<__half> a(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, residual ? one : nullptr, nullptr, nullptr,
                      T, N, K, 0, 0.f, 1);
  const int clusters = divide(a, log_cluster, [](int log) { return num_processors >> log; });
  if (!clusters) return -1;
  const int bytes = a.tile <= kTileRows ? (T <= 32 ? plan<32, 1>(a) : plan<64, 1>(a))
                                        : (T <= 32 ? plan<32, 2>(a) : plan<64, 2>(a));
  const int all[] = {clusters, a.log_cluster, a.tile, a.share, a.rest, a.num_stages, a.stage_bytes(),
                     a.sums_at, kTileGroups * T * a.sum_stride() * 4, a.held_at, a.barriers_at};
  for (int i = 0; i < 11; ++i) found[i] = all[i];
  return bytes;
}
"""
)
