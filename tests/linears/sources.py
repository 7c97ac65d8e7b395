"""The checks of plans by launchers as C++ that a test compiles, and the GPUs that plans are made for."""

from __future__ import annotations

GPUS = ((99 * 1024, 84), (163 * 1024, 108), (227 * 1024, 132))
"""Shared memory that a block can have, and multiprocessors; the last is an H200."""

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
SIGNATURE = (
    "(int T, int N, int K, int itemsize, int blocks, int norm, int residual, int gated, int grouped, const int* plan)"
)
"""`plan`: what the launcher is told, in the order of its record in eet_lab/ops/cuda/plan.py. `grouped`: several scales
of an output, or two blocks that divide its inputs.
"""

TILES = """
template <int kTokens, typename T>
static bool takes(ARGS<T> a, const int* plan, int chunk, int chunk_bytes) {
  return eet::take_plan<kTokens>(a, {plan[0], plan[1], plan[2], plan[3], plan[4]}, chunk, chunk_bytes);
}
template <typename Number>
static int its(int T, int N, int K, int blocks, int norm, int residual, int gated, int few, const int* plan) {
  const auto a = made<ARGS<Number>>(T, N, K, norm, residual, gated, blocks);
  const int chunk = CHUNK, bytes = CHUNK_BYTES;
  return T <= few ? takes<4>(a, plan, chunk, bytes)
         : T <= 8 ? takes<8>(a, plan, chunk, bytes) : takes<16>(a, plan, chunk, bytes);
}
extern "C" int accepts_KERNEL SIGNATURE {
  const int few = FEW;
  return itemsize == 2 ? its<__half>(T, N, K, blocks, norm, residual, gated, few, plan)
                       : its<float>(T, N, K, blocks, norm, residual, gated, few, plan);
}
"""


def filled(text: str, **names: str) -> str:
    for name, meant in (names | {"SIGNATURE": SIGNATURE}).items():
        text = text.replace(name, meant)
    return text


LINEAR = (
    '#include "linear.cu"'
    + ARGS
    + "template <typename T> using Both = eet::TileArgs<T, T>;"
    + filled(TILES, KERNEL="linear", CHUNK_BYTES="64", CHUNK="32", FEW="4", ARGS="Both")
)
INT8 = (
    '#include "int8_linear.cu"'
    + ARGS
    + filled(
        TILES,
        KERNEL="int8_linear",
        CHUNK_BYTES="kInt8Chunk * int(sizeof(Number))",
        CHUNK="kInt8Chunk",
        FEW="grouped ? 0 : 3",
        ARGS="Int8Args",
    )
)
STEPS = """
extern "C" int accepts_KERNEL SIGNATURE {
  if (plan[0] < 1) return 0;
  auto a = made<ARGS<__half>>(T, N, K, norm, residual, gated, blocks);
  BEFORE
  a.steps = eet::cut_inputs(PART, plan[0]), a.tile = plan[1], a.stage_stride = plan[2];
  a.num_stages = plan[3], a.num_tiles = plan[4];
  MORE
  return is_sane(a, plan[5]);
}
extern "C" void inputs_of_KERNEL(int K, int num_steps, int* found) {
  const eet::Steps steps = eet::cut_inputs(K, num_steps);
  for (int i = 0; i < num_steps; ++i) found[i] = steps.inputs(i, K);
}
"""
VECTOR = (
    '#include "vector_linear.cu"'
    + ARGS
    + filled(
        STEPS,
        KERNEL="vector_linear",
        ARGS="VectorArgs",
        BEFORE="",
        PART="K",
        MORE="a.log_tokens = T > 2 ? 2 : T - 1, a.stride = plan[6];",
    )
)
REGISTER = (
    '#include "register_linear.cu"'
    + ARGS
    + filled(
        STEPS,
        KERNEL="register_linear",
        ARGS="RegisterArgs",
        BEFORE="a.divided = grouped;",
        PART="a.part()",
        MORE="a.set_tiles(plan[1], plan[4]); a.at_once = plan[6];",
    )
)
WGMMA = (
    '#include "wgmma_linear.cu"'
    + ARGS
    + filled(
        """
extern "C" int accepts_KERNEL SIGNATURE {
  if (!can_divide(N, K, plan[0], plan[1], plan[2])) return 0;
  auto a = made<WgmmaArgs<__half>>(T, N, K, 0, residual, 0, plan[0]);
  a.log_cluster = plan[1], a.tile = plan[2], a.num_stages = plan[3];
  a.sums_at = plan[4], a.held_at = plan[5], a.barriers_at = plan[6];
  const int bytes = plan[7];
  return a.tile <= kTileRows ? (T <= 32 ? is_sane<32, 1>(a, bytes) : is_sane<64, 1>(a, bytes))
                             : (T <= 32 ? is_sane<32, 2>(a, bytes) : is_sane<64, 2>(a, bytes));
}
""",
        KERNEL="wgmma_linear",
    )
)
CHECKS = {"of_linear": LINEAR, "of_int8": INT8, "of_vector": VECTOR, "of_register": REGISTER, "of_wgmma": WGMMA}
"""By namespace."""
