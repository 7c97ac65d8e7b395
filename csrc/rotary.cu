// What some models do to queries and keys before attention: a norm of each head, then rotary positions.
// T tokens, H heads, G KV heads, D head dim.
#include "eet/attention.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/rotation.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kWarps = 8;  // of a block, each with a head
constexpr int kPairs = 2;  // of neighbouring numbers that a lane has in either half of a head, at most

template <typename T>
struct RotaryArgs {
  T* qkv;  // [T,(H+2G)D]
  eet::Rotation<T> rotation;
  eet::Heads heads;
};

// Why      in PyTorch some twelve launches, each of which reads and writes all queries and keys
// Mapping  a warp a token and head, of queries and keys; blocks of 8 heads: grid T x (H+G)/8
// Traffic  (H+G)*D numbers a token, read and written in place
// Needs    D a multiple of 8, at most 256
// Numerics fp32, rounded once; the angle is rounded to fp32 as PyTorch rounds it
// Source   Su et al. 2021, RoFormer, with the halves of a head as pairs, as GPT-NeoX has them; norms as in Qwen3
template <typename T>
__global__ void __launch_bounds__(32 * kWarps) rotary_kernel(const RotaryArgs<T> a) {
  const int lane = threadIdx.x % 32, head = blockIdx.y * kWarps + threadIdx.x / 32;
  const auto [H, G, D] = a.heads;
  const int64_t token = blockIdx.x;
  eet::wait_for_previous();
  eet::let_next_begin();
  if (head >= H + G) return;
  T* x = a.qkv + a.heads.query(token, head);  // keys come behind queries
  const int half = D / 2;

  float low[kPairs][2], high[kPairs][2], squares = 0.f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int c = 2 * (lane + 32 * i);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      low[i][k] = c < half ? eet::to_float(x[c + k]) : 0.f;
      high[i][k] = c < half ? eet::to_float(x[c + k + half]) : 0.f;
      squares += low[i][k] * low[i][k] + high[i][k] * high[i][k];
    }
  }
  if (const T* weight = head < H ? a.rotation.q_norm : a.rotation.k_norm) {
    const float scale = rsqrtf(eet::warp_sum(squares) / float(D) + a.rotation.eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int c = 2 * (lane + 32 * i);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (c >= half) continue;
        low[i][k] *= scale * eet::to_float(weight[c + k]);
        high[i][k] *= scale * eet::to_float(weight[c + k + half]);
      }
    }
  }
  const float position = float(a.rotation.positions[token]);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int c = 2 * (lane + 32 * i);
    if (c >= half) continue;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 turn = a.rotation.turn(position, c + k);
      x[c + k] = eet::from_float<T>(low[i][k] * turn.x - high[i][k] * turn.y);
      x[c + k + half] = eet::from_float<T>(high[i][k] * turn.x + low[i][k] * turn.y);
    }
  }
}

}  // namespace

// In place. Norms where `q_norm` and `k_norm` are given, positions where `inv_freq` is.
extern "C" cudaError_t eet_rotary(void* qkv, const int64_t* positions, const void* q_norm, const void* k_norm,
                                  const void* inv_freq, float factor, float eps, int dtype, int T, int H, int G, int D,
                                  int dependent, cudaStream_t stream) {
  if (D % 8 || D > 128 * kPairs) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const eet::Rotation<Type> rotation(positions, q_norm, k_norm, inv_freq, factor, eps);
    const RotaryArgs<Type> a{static_cast<Type*>(qkv), rotation, {H, G, D}};
    const dim3 grid(T, eet::ceil_div(H + G, kWarps));
    return eet::launch(rotary_kernel<Type>, {grid, 32 * kWarps, 0, stream, 1, dependent != 0}, a);
  });
}
