// Linear layers: a weight-streaming product for few tokens, and what follows cuBLAS for many.
// T tokens, N outputs, K inputs.
#include "eet/activation.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/norm.cuh"

namespace {

constexpr int kWarps = 16;
constexpr int kTile = 8;    // outputs that a group of warps computes at a time
constexpr int kDepth = 8;   // weight vectors that a thread has on their way
constexpr int kMaxTokens = 16;

template <typename T>
struct LinearArgs {
  T* out;             // [T,N]
  const T* x;         // [T,K]
  const T* weight;    // [N,K]
  const T* bias;      // [N] or null
  const T* residual;  // [T,N] or null; may be `out`
  eet::Norm<T> norm;  // no weight: none
  int num_tokens, N, K, act, group_warps, stride;
};

// A warp's part of out^T[8 outputs, tokens], for one vector of weights a lane: lane 4g+t holds kVec inputs of output g.
// The order of the inputs inside a product does not matter, as long as weights and activations agree on it; so a lane's
// 16 contiguous bytes serve as the fragments of two mma, and no weight passes through shared memory.
template <typename T, int kTokens>
struct Product {
  static constexpr int kChunk = 32;  // inputs in one step of a warp
  float sum[4] = {};

  __device__ void add(uint4 w, const T* rows, int stride, int num_tokens, int k) {
    const int g = threadIdx.x % 32 / 4;
    // A row past the last token repeats it: its sums are never stored.
    const uint4 low = eet::load(rows + min(g, num_tokens - 1) * stride + k);
    const uint4 high = kTokens > 8 ? eet::load(rows + min(g + 8, num_tokens - 1) * stride + k) : eet::zeros();
    eet::mma<T>(sum, low.x, high.x, low.y, high.y, w.x, w.y);
    eet::mma<T>(sum, low.z, high.z, low.w, high.w, w.z, w.w);
  }

  __device__ void store(float* partial) {  // [kTokens][kTile]
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    *reinterpret_cast<float2*>(partial + g * kTile + 2 * t) = make_float2(sum[0], sum[1]);
    if (kTokens > 8) *reinterpret_cast<float2*>(partial + (g + 8) * kTile + 2 * t) = make_float2(sum[2], sum[3]);
  }
};

// The same on CUDA cores, true fp32.
template <int kTokens>
struct Product<float, kTokens> {
  static constexpr int kChunk = 16;
  float sum[kTokens] = {};

  __device__ void add(uint4 w, const float* rows, int stride, int num_tokens, int k) {
    float weight[4], x[4];
    eet::unpack<float>(w, weight);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= num_tokens) break;
      eet::unpack<float>(eet::load(rows + token * stride + k), x);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[token] += weight[i] * x[i];
    }
  }

  __device__ void store(float* partial) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      const float whole = eet::warp_sum<4>(sum[token]);
      if (t == 0) partial[token * kTile + g] = whole;
    }
  }
};

// Why      a decode step reads every weight once for a handful of tokens: the time is the bytes over the bandwidth
// Mapping  a block a multiprocessor, 16 warps in groups; a group takes every so many-th tile of 8 outputs, its warps
//          split the inputs and add up through shared memory; the next tile's weights are on their way meanwhile
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 64 KiB on their way a multiprocessor
// Needs    K a multiple of 8, T <= 16, T*K activations in shared memory
// Numerics tensor cores, or fp32 multiply-adds; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   the fragment order is after Frantar et al. 2024, MARLIN, without its quantization
template <typename T, int kTokens>
__global__ void __launch_bounds__(kWarps * 32, 1) linear_kernel(const LinearArgs<T> a) {
  using Part = Product<T, kTokens>;
  extern __shared__ uint4 shared[];
  __shared__ float partial[2][kWarps][kTokens * kTile];
  T* rows = reinterpret_cast<T*>(shared);

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int group = warp / a.group_warps, member = warp % a.group_warps, num_groups = kWarps / a.group_warps;
  const int thread = threadIdx.x % (a.group_warps * 32);
  const int num_tiles = (a.N + kTile - 1) / kTile, stride = gridDim.x * num_groups;
  const int step = a.group_warps * Part::kChunk;  // inputs in one step of a group
  const int offset = member * Part::kChunk + t * eet::kVec<T>;

  const auto fetch = [&](int tile, int k) {
    const int n = tile * kTile + g;
    return n < a.N && k < a.K ? eet::load_once(a.weight + int64_t(n) * a.K + k) : eet::zeros();
  };

  int tile = blockIdx.x + group * gridDim.x;
  uint4 weights[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) weights[i] = fetch(tile, offset + i * step);
  eet::stage_rows<kWarps>(rows, a.stride, a.x, a.num_tokens, a.K, a.norm);
  __syncthreads();

  for (int buffer = 0; tile < num_tiles; tile += stride, buffer ^= 1) {
    Part part;
    for (int k = offset; k < a.K + t * eet::kVec<T>;) {
      // Where this tile's inputs end, the next tile's begin.
      const bool last = k + kDepth * step >= a.K + t * eet::kVec<T>;
      const int next_tile = last ? tile + stride : tile, next_k = last ? offset : k + kDepth * step;
#pragma unroll
      for (int i = 0; i < kDepth; ++i, k += step) {
        const uint4 w = weights[i];
        weights[i] = fetch(next_tile, next_k + i * step);
        if (k - t * eet::kVec<T> < a.K) part.add(w, rows, a.stride, a.num_tokens, k);
      }
    }
    part.store(partial[buffer][warp]);

    // The group's threads finish the tile. Two buffers: a tile's sums are read before those of the tile after next come.
    eet::barrier(1 + group, a.group_warps * 32);
    for (int i = thread; i < a.num_tokens * kTile; i += a.group_warps * 32) {
      const int n = tile * kTile + i % kTile;
      if (n >= a.N) continue;
      float sum = a.bias ? eet::to_float(a.bias[n]) : 0.f;
      for (int j = 0; j < a.group_warps; ++j) sum += partial[buffer][group * a.group_warps + j][i];
      sum = eet::activate(sum, a.act);
      const int64_t to = int64_t(i / kTile) * a.N + n;
      a.out[to] = eet::from_float<T>(a.residual ? sum + eet::to_float(a.residual[to]) : sum);
    }
  }
}

// Why      cuBLAS leaves bias, activation and residual to others; one pass over its result does all three
// Mapping  a thread a vector, or a number where N is no multiple of a vector
// Traffic  reads T*N (and the residual's T*N), writes T*N
// Needs    nothing; `out` may be y or the residual
// Numerics fp32, rounded once
// Source   the same fusion as EET's add_bias kernels
template <typename T, int kWidth>
__global__ void epilogue_kernel(T* out, const T* y, const T* bias, const T* residual, int64_t num, int N, int act) {
  const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (first >= num) return;
  const int n = first % N;
  alignas(16) T value[kWidth], shift[kWidth], base[kWidth];
  const auto get = [](T(&to)[kWidth], const T* from) {
    if constexpr (kWidth == 1) {
      to[0] = from[0];
    } else {
      *reinterpret_cast<uint4*>(to) = eet::load(from);
    }
  };
  get(value, y + first);
  if (bias) get(shift, bias + n);
  if (residual) get(base, residual + first);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float x = eet::to_float(value[i]) + (bias ? eet::to_float(shift[i]) : 0.f);
    x = eet::activate(x, act);
    value[i] = eet::from_float<T>(residual ? x + eet::to_float(base[i]) : x);
  }
  if constexpr (kWidth == 1) {
    out[first] = value[0];
  } else {
    eet::store(out + first, *reinterpret_cast<uint4*>(value));
  }
}

// Few tiles: more warps share one. Many: each pair of warps has its own, and all start together.
int group_warps(int num_tiles, int num_blocks) {
  int warps = kWarps;
  while (warps > 2 && num_blocks * (kWarps / warps) < num_tiles) warps /= 2;
  return warps;
}

// Rows in shared memory are an odd number of 64 bytes apart: the 8 rows that a warp reads lie in different banks.
template <typename T>
int row_stride(int K) {
  return (eet::ceil_div(K * int(sizeof(T)), 64) | 1) * 64 / int(sizeof(T));
}

template <typename T, int kTokens>
cudaError_t launch_linear(LinearArgs<T> a, cudaStream_t stream) {
  const int num_tiles = eet::ceil_div(a.N, kTile);
  const int num_blocks = eet::device_attribute(cudaDevAttrMultiProcessorCount);
  a.group_warps = group_warps(num_tiles, num_blocks);
  a.stride = row_stride<T>(a.K);
  const int bytes = a.num_tokens * a.stride * sizeof(T);
  if (cudaError_t error = eet::allow_shared(linear_kernel<T, kTokens>, bytes)) return error;
  linear_kernel<T, kTokens><<<min(num_blocks, num_tiles), kWarps * 32, bytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for at most 16 tokens.
extern "C" cudaError_t eet_linear(void* out, const void* x, const void* weight, const void* bias, const void* residual,
                                  const void* norm_weight, const void* norm_bias, int dtype, int T, int N, int K,
                                  int act, float eps, cudaStream_t stream) {
  if (T > kMaxTokens) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const LinearArgs<Type> a{static_cast<Type*>(out), in(x), in(weight), in(bias), in(residual),
                             {in(norm_weight), in(norm_bias), eps}, T, N, K, act, 0, 0};
    return T <= 8 ? launch_linear<Type, 8>(a, stream) : launch_linear<Type, 16>(a, stream);
  });
}

// out = act(y + bias) + residual, for y = x weight^T.
extern "C" cudaError_t eet_epilogue(void* out, const void* y, const void* bias, const void* residual, int dtype, int T,
                                    int N, int act, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    constexpr int kThreads = 256;
    const int64_t num = int64_t(T) * N;
    const auto launch = [&](auto kernel, int width) {
      const int64_t num_blocks = (num + kThreads * width - 1) / (kThreads * width);
      kernel<<<num_blocks, kThreads, 0, stream>>>(static_cast<Type*>(out), static_cast<const Type*>(y),
                                                  static_cast<const Type*>(bias),
                                                  static_cast<const Type*>(residual), num, N, act);
      return cudaGetLastError();
    };
    return N % eet::kVec<Type> ? launch(epilogue_kernel<Type, 1>, 1)
                               : launch(epilogue_kernel<Type, eet::kVec<Type>>, eet::kVec<Type>);
  });
}
