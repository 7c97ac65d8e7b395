// Linear layers: a weight-streaming product for few tokens, and what follows cuBLAS for many.
// T tokens, N outputs, K inputs.
#include "eet/activation.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/norm.cuh"

namespace {

template <int kTokens>
constexpr int kLogWarps = kTokens == 8 ? 5 : 4;  // as many as registers allow
constexpr int kTile = 8;   // outputs that a group of warps computes at a time
constexpr int kDepth = 4;  // weight vectors that a thread has on their way
constexpr int kMaxTokens = 16;

template <typename T>
struct LinearArgs {
  T* out;             // [T,N]
  const T* x;         // [T,K]
  const T* weight;    // [N,K]
  const T* bias;      // [N] or null
  const T* residual;  // [T,N] or null; may be `out`
  eet::Norm<T> norm;  // no weight: none
  int num_tokens, N, K, act, stride;
  int log_group, log_team;  // warps that share a tile, and a token's norm
};

// A warp's part of out^T[8 outputs, tokens], for one vector of weights a lane: lane 4g+t holds kVec inputs of output g.
// The order of the inputs inside a product does not matter, as long as weights and activations agree on it; so a lane's
// 16 contiguous bytes serve as the fragments of two mma, and no weight passes through shared memory.
template <typename T, int kTokens>
struct Product {
  static constexpr int kChunk = 32;  // inputs in one step of a warp
  const T *low, *high;               // the lane's tokens; one past the last repeats the last: its sums are never stored
  float sum[2][4] = {};              // two, so that one mma need not wait for the other

  __device__ Product(const T* rows, int stride, int num_tokens) {
    const int g = threadIdx.x % 32 / 4;
    low = rows + min(g, num_tokens - 1) * stride;
    high = rows + min(g + 8, num_tokens - 1) * stride;
  }

  __device__ void add(uint4 w, int k, int) {
    const uint4 x = eet::load(low + k), y = kTokens > 8 ? eet::load(high + k) : eet::zeros();
    eet::mma<T>(sum[0], x.x, y.x, x.y, y.y, w.x, w.y);
    eet::mma<T>(sum[1], x.z, y.z, x.w, y.w, w.z, w.w);
  }

  __device__ void store(float* partial) {  // [kTokens][kTile]
    float* to = partial + threadIdx.x % 32 / 4 * kTile + threadIdx.x % 4 * 2;
    *reinterpret_cast<float2*>(to) = make_float2(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]);
    if (kTokens <= 8) return;
    *reinterpret_cast<float2*>(to + 8 * kTile) = make_float2(sum[0][2] + sum[1][2], sum[0][3] + sum[1][3]);
  }
};

// The same on CUDA cores, true fp32.
template <int kTokens>
struct Product<float, kTokens> {
  static constexpr int kChunk = 16;
  const float* rows;
  int stride;
  float sum[kTokens] = {};

  __device__ Product(const float* rows, int stride, int) : rows(rows), stride(stride) {}

  __device__ void add(uint4 w, int k, int num_tokens) {
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
// Mapping  a block a multiprocessor, 32 warps (16 beyond 8 tokens) in groups; a group takes every so many-th tile of 8
//          outputs, its warps split the inputs and add up through shared memory, while the next weights are on their way
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 64 KiB on their way a multiprocessor
// Needs    K a multiple of 8, T <= 16, T*K activations in shared memory
// Numerics tensor cores, or fp32 multiply-adds; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   the fragment order is after Frantar et al. 2024, MARLIN, without its quantization
template <typename T, int kTokens>
__global__ void __launch_bounds__(32 << kLogWarps<kTokens>, 1) linear_kernel(const LinearArgs<T> a) {
  constexpr int kWarps = 1 << kLogWarps<kTokens>;
  using Part = Product<T, kTokens>;
  extern __shared__ uint4 shared[];
  __shared__ float partial[2][kWarps][kTokens * kTile];
  T* rows = reinterpret_cast<T*>(shared);
  eet::RowStager<kLogWarps<kTokens>, T> stager(a.x, a.num_tokens, a.log_team, a.K, a.stride, a.norm);

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int group_warps = 1 << a.log_group, group_threads = 32 << a.log_group;
  const int group = warp >> a.log_group, member = warp & (group_warps - 1), thread = threadIdx.x & (group_threads - 1);
  const int num_tiles = (a.N + kTile - 1) / kTile, tile_step = gridDim.x * kWarps >> a.log_group;

  // The warp's steps through the inputs: its lane's vector begins at k_of(step). Past the last input and the last output a
  // lane reads the last one again: there the activation is 0, and here nothing is stored.
  const int num_steps = ((a.K + Part::kChunk - 1) / Part::kChunk - member + group_warps - 1) >> a.log_group;
  const int first_k = member * Part::kChunk + t * eet::kVec<T>, step_k = Part::kChunk << a.log_group;
  const int last_k = a.K - eet::kVec<T>;
  const auto row_of = [&](int tile) { return a.weight + int64_t(min(tile * kTile + g, a.N - 1)) * a.K; };

  int tile = blockIdx.x + group * gridDim.x;
  const T* row = row_of(tile);
  uint4 weights[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    if (i < num_steps && tile < num_tiles) weights[i] = eet::load_once(row + min(first_k + i * step_k, last_k));
  }
  stager.request_norm();
  stager.stage(rows);
  __syncthreads();

#pragma unroll 1
  for (int buffer = 0; tile < num_tiles; tile += tile_step, buffer ^= 1) {
    // The thread that finishes an output, and what it adds: on its way while the products are computed.
    constexpr int kOutputs = kTokens / 8;  // for each of a group's threads, which are 64 at least
    const int64_t n = tile * kTile + threadIdx.x % kTile;
    T bias[kOutputs], residual[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int token = (thread + i * group_threads) / kTile;
      const bool mine = token < a.num_tokens && n < a.N;
      bias[i] = mine && a.bias ? a.bias[n] : T(0.f);
      residual[i] = mine && a.residual ? a.residual[token * int64_t(a.N) + n] : T(0.f);
    }

    Part part(rows, a.stride, a.num_tokens);
#pragma unroll 1
    for (int step = 0, k = first_k; step < num_steps; step += kDepth) {
      // Where this tile's steps end, the next tile's begin.
      const bool last = step + kDepth >= num_steps;
      if (last) row = row_of(tile + tile_step);
      const int next_k = last ? first_k : k + kDepth * step_k;
      const int more = last ? (tile + tile_step < num_tiles ? num_steps : 0) : num_steps - step - kDepth;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (i < num_steps - step) part.add(weights[i], k + i * step_k, a.num_tokens);
        if (i < more) weights[i] = eet::load_once(row + min(next_k + i * step_k, last_k));
      }
      k = next_k;
    }
    part.store(partial[buffer][warp]);

    // Two buffers: a tile's sums are read before those of the tile after next come.
    eet::barrier(1 + group, group_threads);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int output = thread + i * group_threads, token = output / kTile;
      if (token >= a.num_tokens || n >= a.N) continue;
      float sum = eet::to_float(bias[i]);
#pragma unroll 2
      for (int j = 0; j < group_warps; ++j) sum += partial[buffer][(group << a.log_group) + j][output];
      sum = eet::activate(sum, a.act) + eet::to_float(residual[i]);
      a.out[token * int64_t(a.N) + n] = eet::from_float<T>(sum);
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

// Rows in shared memory are an odd number of 64 bytes apart: the 8 rows that a warp reads lie in different banks.
template <typename T>
int row_stride(int K) {
  return (eet::ceil_div(K * int(sizeof(T)), 64) | 1) * 64 / int(sizeof(T));
}

template <typename T, int kTokens>
cudaError_t launch_linear(LinearArgs<T> a, cudaStream_t stream) {
  const int num_tiles = eet::ceil_div(a.N, kTile);
  const int num_blocks = min(num_tiles, eet::device_attribute(cudaDevAttrMultiProcessorCount));
  // Few tiles: more warps share one. Many: each pair of warps has its own, and all start together.
  a.log_group = a.log_team = kLogWarps<kTokens>;
  while (a.log_group > 1 && num_blocks << (kLogWarps<kTokens> - a.log_group) < num_tiles) --a.log_group;
  while (1 << (kLogWarps<kTokens> - a.log_team) < a.num_tokens) --a.log_team;
  a.stride = row_stride<T>(a.K);
  const int bytes = a.num_tokens * a.stride * sizeof(T);
  if (cudaError_t error = eet::allow_shared(linear_kernel<T, kTokens>, bytes)) return error;
  linear_kernel<T, kTokens><<<num_blocks, 32 << kLogWarps<kTokens>, bytes, stream>>>(a);
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
                             {in(norm_weight), in(norm_bias), eps}, T, N, K, act, 0, 0, 0};
    return T <= 8 ? launch_linear<Type, 8>(a, stream) : launch_linear<Type, 16>(a, stream);
  });
}

// out = act(y + bias) + residual, for y = x weight^T.
extern "C" cudaError_t eet_epilogue(void* out, const void* y, const void* bias, const void* residual, int dtype, int T,
                                    int N, int act, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    constexpr int kBlock = 256;
    const int64_t num = int64_t(T) * N;
    const auto launch = [&](auto kernel, int width) {
      const int64_t num_blocks = (num + kBlock * width - 1) / (kBlock * width);
      kernel<<<num_blocks, kBlock, 0, stream>>>(static_cast<Type*>(out), static_cast<const Type*>(y),
                                                  static_cast<const Type*>(bias),
                                                  static_cast<const Type*>(residual), num, N, act);
      return cudaGetLastError();
    };
    return N % eet::kVec<Type> ? launch(epilogue_kernel<Type, 1>, 1)
                               : launch(epilogue_kernel<Type, eet::kVec<Type>>, eet::kVec<Type>);
  });
}
