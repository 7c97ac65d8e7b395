// Linear layers of few tokens: weights stream through shared memory, once. Which products in 16 bits are left to
// vector_linear.cu, register_linear.cu, wgmma_linear.cu and cuBLAS, eet_lab/ops/cuda/choice.py says. T tokens, N outputs, K inputs.
#include <type_traits>

#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/linear_tiles.cuh"
#include "eet/mma.cuh"

namespace {

using eet::kTile;

// A warp's part of out^T[16 outputs, tokens]; lane 4g+t reads 16 bytes of outputs g and g + 8 at a time.
// The order of the inputs inside a product does not matter, as long as weights and activations agree on it; so a lane's
// 16 contiguous bytes serve as the fragments of two mma.
template <typename T, int kTokens>
struct Product {
  static constexpr int kChunk = 32;                 // inputs in one step of a warp
  static constexpr int kHalves = (kTokens + 7) / 8;
  float sum[kHalves][2][4] = {};                    // two, so that one mma need not wait for the other
  const T* x;

  __device__ Product(const T* rows, int stride, int num_tokens) {
    const int g = threadIdx.x % 32 / 4;
    x = rows + min(g, num_tokens - 1) * stride;  // past the last token: the last again; such sums are never read
    next = (min(g + 8, num_tokens - 1) - min(g, num_tokens - 1)) * stride;
  }

  __device__ void add(uint4 low, uint4 high, float2, int k, int) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint4 v = eet::load(x + half * next + k);
      eet::mma<T>(sum[half][0], low.x, high.x, low.y, high.y, v.x, v.y);
      eet::mma<T>(sum[half][1], low.z, high.z, low.w, high.w, v.z, v.w);
    }
  }

  __device__ void store(float* partial, int num_tokens) {
    eet::store_fragments<kHalves>(partial, num_tokens,
                                  [&](int half, int i) { return sum[half][0][i] + sum[half][1][i]; });
  }

 private:
  int next;
};

// The same on CUDA cores, true fp32.
template <int kTokens>
struct Product<float, kTokens> {
  static constexpr int kChunk = 16;
  const float* rows;
  int stride;
  float sum[2][kTokens] = {};

  __device__ Product(const float* rows, int stride, int) : rows(rows), stride(stride) {}

  __device__ void add(uint4 low, uint4 high, float2, int k, int num_tokens) {
    float weight[2][4], x[4];
    eet::unpack<float>(low, weight[0]);
    eet::unpack<float>(high, weight[1]);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= num_tokens) break;
      eet::unpack<float>(eet::load(rows + token * stride + k), x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[0][token] += weight[0][i] * x[i];
        sum[1][token] += weight[1][i] * x[i];
      }
    }
  }

  __device__ void store(float* partial, int num_tokens) { eet::store_quarters(sum, partial, num_tokens); }
};

// Why      a decode step reads every weight once for a handful of tokens: the time is the bytes over the bandwidth
// Mapping  a block a multiprocessor, each with an equal share of the outputs; one warp keeps a ring of weights filled, from
//          before the kernel ahead has ended; 8 or 16 warps split the inputs of 16 outputs at a time and add up in
//          shared memory
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 100 KiB on their way a multiprocessor
// Needs    K a multiple of 8, T <= 16, T*K activations in shared memory
// Numerics tensor cores, or fp32 multiply-adds; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   the fragment order is after Frantar et al. 2024, MARLIN, without its quantization
template <typename T, int kTokens, typename Choice>
__global__ void __launch_bounds__(eet::kReaders<kTokens> + 32, eet::kResident)
    linear_kernel(const eet::TileArgs<T, T> a, const Choice choice) {
  extern __shared__ __align__(128) uint4 shared[];  // stages at odd places take much longer (LOG)
  constexpr int kChunks = std::is_same_v<Choice, eet::WithNoise> ? 1 : 2;  // noise takes registers too
  eet::multiply_tiles<kTokens, Product<T, kTokens>, eet::NoScales, kChunks>(a, shared, choice);
}

template <int kTokens, typename T>
cudaError_t launch_linear(eet::TileArgs<T, T> a, const eet::TilePlan& plan, eet::WithNoise noise, int num_blocks,
                          bool dependent, cudaStream_t stream) {
  if (!eet::take_plan<kTokens>(a, plan, 32, 64)) return cudaErrorInvalidValue;
  const eet::Launch how{dim3(num_blocks), eet::kReaders<kTokens> + 32, plan.shared_bytes, stream, 1, dependent};
  if constexpr (sizeof(T) == 2) {
    if (a.unit == 2) return eet::launch(linear_kernel<T, kTokens, eet::Gated>, how, a, eet::Gated{});
  }
  return noise.exists() ? eet::launch(linear_kernel<T, kTokens, eet::WithNoise>, how, a, noise)
                        : eet::launch(linear_kernel<T, kTokens, eet::Largest>, how, a, eet::Largest{});
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for at most 16 tokens; `best` gets each block's largest of a token, or
// with `noise` the one that is drawn where its temperature [T] is above 0. `gated`, in 16 bits: weights are N/2 gates and
// N/2 that they let through, act(gate) times which goes to out [T,N/2].
extern "C" cudaError_t eet_linear(void* out, void* best, const void* x, const int64_t* rows, const void* weight,
                                  const void* bias, const void* residual, const void* norm_weight,
                                  const void* norm_bias, const int64_t* positions, const int64_t* noise,
                                  const float* temperature, int dtype, int T, int N, int K, int act, int gated,
                                  float eps, int num_blocks, int stride, int stage_rows, int stage_inputs,
                                  int num_stages, int shared_bytes, int dependent, cudaStream_t stream) {
  if (T < 1 || T > eet::kMaxTokens || !eet::can_count(T, N)) return cudaErrorInvalidValue;
  if (num_blocks < 1 || num_blocks > N) return cudaErrorInvalidValue;
  if (!eet::can_pair(gated, N, best, residual)) return cudaErrorInvalidValue;
  const eet::WithNoise drawn{{noise, temperature, positions, rows}};
  const eet::TilePlan plan{stride, stage_rows, stage_inputs, num_stages, shared_bytes};
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    eet::TileArgs<Type, Type> a(out, best, x, rows, weight, bias, residual, norm_weight, norm_bias, T, N, K, act, eps,
                                num_blocks);
    if (gated && sizeof(Type) != 2) return cudaErrorInvalidValue;
    if (gated) a.pair(num_blocks);
    return T <= 4   ? launch_linear<4>(a, plan, drawn, num_blocks, dependent, stream)
           : T <= 8 ? launch_linear<8>(a, plan, drawn, num_blocks, dependent, stream)
                    : launch_linear<16>(a, plan, drawn, num_blocks, dependent, stream);
  });
}
