// What some models do to queries and keys before attention: a norm of each head, then rotary positions.
// T tokens, H heads, G KV heads, D head dim.
#include "eet/attention.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kWarps = 8;  // of a block, each with a head
constexpr int kPairs = 2;  // of neighbouring numbers that a lane has in either half of a head, at most

template <typename T>
struct RotaryArgs {
  T* qkv;                      // [T,(H+2G)D]
  const int64_t* positions;    // [T]
  const T *q_norm, *k_norm;    // [D] or null
  const float* inv_freq;       // [D/2] or null: radians from one position to the next
  float factor, eps;           // of cosines and sines; of the norms
  eet::Heads heads;
};

// The cosine and the sine of an angle, to 1e-7, however many turns it has up to 2^17. cosf and sinf keep a table in local
// memory for angles beyond 1e5. Polynomials: Cephes (Moshier 1989), sinf.c.
__device__ inline float2 rotation(float angle) {
  const float quarters = rintf(angle * 0.63661977f);
  const float x = fmaf(quarters, 4.3711388e-8f, fmaf(quarters, -1.57079637f, angle)), z = x * x;  // pi / 2 in two parts
  const float sine = fmaf(fmaf(fmaf(-1.9515296e-4f, z, 8.3321609e-3f), z, -1.6666655e-1f) * z, x, x);
  const float cosine = fmaf(fmaf(fmaf(2.4433157e-5f, z, -1.3887316e-3f), z, 4.1666646e-2f) * z, z, fmaf(-0.5f, z, 1.f));
  const int quadrant = int(quarters) & 3;
  const float2 turned = quadrant & 1 ? make_float2(-sine, cosine) : make_float2(cosine, sine);
  return quadrant & 2 ? make_float2(-turned.x, -turned.y) : turned;
}

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
  if (const T* weight = head < H ? a.q_norm : a.k_norm) {
    const float scale = rsqrtf(eet::warp_sum(squares) / float(D) + a.eps);
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
  const float position = float(a.positions[token]);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int c = 2 * (lane + 32 * i);
    if (c >= half) continue;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float2 turn = make_float2(1.f, 0.f);
      if (a.inv_freq) {
        turn = rotation(position * a.inv_freq[c + k]);
        turn.x *= a.factor, turn.y *= a.factor;
      }
      x[c + k] = eet::from_float<T>(low[i][k] * turn.x - high[i][k] * turn.y);
      x[c + k + half] = eet::from_float<T>(high[i][k] * turn.x + low[i][k] * turn.y);
    }
  }
}

}  // namespace

// In place. Norms where `q_norm` and `k_norm` are given, positions where `inv_freq` is.
extern "C" cudaError_t eet_rotary(void* qkv, const int64_t* positions, const void* q_norm, const void* k_norm,
                                  const float* inv_freq, float factor, float eps, int dtype, int T, int H, int G, int D,
                                  int dependent, cudaStream_t stream) {
  if (D % 8 || D > 128 * kPairs) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const RotaryArgs<Type> a{static_cast<Type*>(qkv), positions, in(q_norm), in(k_norm), inv_freq, factor, eps, {H, G, D}};
    const dim3 grid(T, eet::ceil_div(H + G, kWarps));
    return eet::launch(rotary_kernel<Type>, {grid, 32 * kWarps, 0, stream, 1, dependent != 0}, a);
  });
}
