// Linear layers of few tokens: weights stream through shared memory, once. T tokens, N outputs, K inputs.
#include "eet/activation.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/mma.cuh"
#include "eet/norm.cuh"
#include "eet/ordered.cuh"
#include "eet/ring.cuh"

namespace {

constexpr int kTile = 16;  // outputs that a warp computes at a time
constexpr int kMaxTokens = 16;
template <int kTokens>
constexpr int kLogWarps = kTokens == 8 ? 4 : 3;  // that multiply, as many as registers allow; one more fills the ring
template <int kTokens>
constexpr int kReaders = 32 << kLogWarps<kTokens>;
template <int kTokens>
constexpr int kTiles = kReaders<kTokens> / kTile / kTokens;  // between two reductions: an output for each thread
// Two kernels share a multiprocessor where one can begin before the other ends.
#if __CUDA_ARCH__ >= 900
constexpr int kResident = 2;
#else
constexpr int kResident = 1;
#endif

template <typename T>
struct LinearArgs {
  T* out;             // [T,N] or null
  uint64_t* best;     // [T,blocks] or null: the largest output and where it stands, a pair of ordered.cuh
  const T* x;         // [.,K]
  const int64_t* at;  // [T] or null: token i is row at[i] of x
  const T* weight;    // [N,K]
  const T* bias;      // [N] or null
  const T* residual;  // [T,N] or null; may be `out`
  eet::Norm<T> norm;  // no weight: none
  int num_tokens, N, K, act;
  int stride, log_team;  // of a token in shared memory; warps that share a token's norm
  int stage_rows, stage_inputs, num_stages;

  // Bytes; an odd number of 64, so that the 8 outputs that a warp reads at a time lie in different banks.
  __host__ __device__ int stage_stride() const { return (stage_inputs * int(sizeof(T)) / 64 | 1) * 64; }
  __host__ __device__ int x_bytes() const { return (num_tokens * stride + (norm.weight ? 2 * K : 0)) * sizeof(T); }
  __host__ __device__ int partial_floats(int tiles, int warps) const { return tiles * warps * kTile * num_tokens; }
};

// A warp's part of out^T[16 outputs, tokens]; lane 4g+t reads 16 bytes of outputs g and g + 8 at a time.
// The order of the inputs inside a product does not matter, as long as weights and activations agree on it; so a lane's
// 16 contiguous bytes serve as the fragments of two mma.
template <typename T, int kTokens>
struct Product {
  static constexpr int kChunk = 32;                 // inputs in one step of a warp
  float sum[kTokens / 8][2][4] = {};                // two, so that one mma need not wait for the other
  const T* x;

  __device__ Product(const T* rows, int stride, int num_tokens) {
    const int g = threadIdx.x % 32 / 4;
    x = rows + min(g, num_tokens - 1) * stride;  // past the last token: the last again; such sums are never read
    next = (min(g + 8, num_tokens - 1) - min(g, num_tokens - 1)) * stride;
  }

  __device__ void add(uint4 low, uint4 high, int k, int) {
#pragma unroll
    for (int half = 0; half < kTokens / 8; ++half) {
      const uint4 v = eet::load(x + half * next + k);
      eet::mma<T>(sum[half][0], low.x, high.x, low.y, high.y, v.x, v.y);
      eet::mma<T>(sum[half][1], low.z, high.z, low.w, high.w, v.z, v.w);
    }
  }

  __device__ void store(float* partial, int num_tokens) {  // [tokens][kTile]
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < kTokens / 8; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = half * 8 + t * 2 + i % 2;
        if (token < num_tokens) partial[token * kTile + g + i / 2 * 8] = sum[half][0][i] + sum[half][1][i];
      }
    }
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

  __device__ void add(uint4 low, uint4 high, int k, int num_tokens) {
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

  __device__ void store(float* partial, int num_tokens) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token >= num_tokens) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float whole = eet::warp_sum<4>(sum[half][token]);
        if (t == 0) partial[token * kTile + half * 8 + g] = whole;
      }
    }
  }
};

// Why      a decode step reads every weight once for a handful of tokens: the time is the bytes over the bandwidth
// Mapping  a block a multiprocessor, each with an equal share of the outputs; one warp keeps a ring of weights filled, from
//          before the kernel ahead has ended; 8 or 16 warps split the inputs of 16 outputs at a time and add up in
//          shared memory
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 100 KiB on their way a multiprocessor
// Needs    K a multiple of 8, T <= 16, T*K activations in shared memory
// Numerics tensor cores, or fp32 multiply-adds; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   the fragment order is after Frantar et al. 2024, MARLIN, without its quantization
template <typename T, int kTokens>
__global__ void __launch_bounds__(kReaders<kTokens> + 32, kResident) linear_kernel(const LinearArgs<T> a) {
  using Part = Product<T, kTokens>;
  constexpr int kLogWarps = ::kLogWarps<kTokens>, kWarps = 1 << kLogWarps, kReaders = ::kReaders<kTokens>;
  constexpr int kGroup = kTiles<kTokens> * kTile;  // outputs between two reductions
  extern __shared__ uint4 shared[];
  T* rows = reinterpret_cast<T*>(shared);
  float* partial = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + a.x_bytes());
  char* stages = reinterpret_cast<char*>(partial + a.partial_floats(kTiles<kTokens>, kWarps));
  const int stage_bytes = a.stage_rows * a.stage_stride();
  const eet::Ring ring{stages, reinterpret_cast<uint64_t*>(stages + a.num_stages * stage_bytes), a.num_stages,
                       stage_bytes};
  const int warp = threadIdx.x / 32;
  const int begin = int64_t(a.N) * blockIdx.x / gridDim.x, end = int64_t(a.N) * (blockIdx.x + 1) / gridDim.x;
  eet::RingPlace place;

  if (threadIdx.x == kReaders) ring.init(kWarps);
  __syncthreads();
  if (warp == kWarps) {
    for (int n = begin; n < end; n += kTile) {
      for (int k = 0; k < a.K; k += a.stage_inputs, place.step(a.num_stages)) {
        ring.fill(place, reinterpret_cast<const char*>(a.weight + int64_t(n) * a.K + k), int64_t(a.K) * sizeof(T),
                  min(kTile, end - n), min(a.stage_inputs, a.K - k) * int(sizeof(T)), a.stage_stride());
      }
    }
    return;
  }
  // The thread's output, and what is added to it: on its way before it is needed.
  const int token = threadIdx.x / kGroup, output = threadIdx.x % kGroup;
  const auto mine = [&](int n) { return token < a.num_tokens && n < end; };
  const auto bias_of = [&](int n) { return mine(n) && a.bias ? eet::to_float(a.bias[n]) : 0.f; };
  const auto residual_of = [&](int n) {
    return mine(n) && a.residual ? eet::to_float(a.residual[token * int64_t(a.N) + n]) : 0.f;
  };
  float bias = bias_of(begin + output);
  eet::RowStager<kWarps, T, kTokens> stager(a.num_tokens, a.log_team, a.K, a.stride, a.norm,
                                            rows + a.num_tokens * a.stride);
  stager.request_norm();
  eet::let_next_begin();
  eet::wait_for_previous();
  float residual = residual_of(begin + output);
  stager.stage(rows, a.x, a.at);
  eet::barrier(1, kReaders);

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint64_t best = 0;
  int chunk = 0;  // counts those of all stages, so that the warps have equally many
#pragma unroll 1
  for (int first = begin; first < end; first += kGroup) {
#pragma unroll 1
    for (int tile = 0; tile < kTiles<kTokens> && first + tile * kTile < end; ++tile) {
      const int num_rows = min(kTile, end - first - tile * kTile);
      Part part(rows, a.stride, a.num_tokens);
#pragma unroll 1
      for (int k = 0; k < a.K; k += a.stage_inputs, place.step(a.num_stages)) {
        // Past the last output and the last input the last is read again: there the activation is 0, and here nothing is
        // stored.
        const int num_inputs = min(a.stage_inputs, a.K - k), num_chunks = (num_inputs + Part::kChunk - 1) / Part::kChunk;
        const char* stage = ring.wait(place);
        const T* low = reinterpret_cast<const T*>(stage + min(g, num_rows - 1) * a.stage_stride());
        const T* high = reinterpret_cast<const T*>(stage + min(g + 8, num_rows - 1) * a.stage_stride());
#pragma unroll 2
        for (int i = (warp - chunk) & (kWarps - 1); i < num_chunks; i += kWarps) {
          const int mine = i * Part::kChunk + t * eet::kVec<T>, at = min(mine, num_inputs - eet::kVec<T>);
          part.add(eet::load(low + at), eet::load(high + at), k + mine, a.num_tokens);
        }
        ring.release(place);
        chunk += num_chunks;
      }
      part.store(partial + (tile * kWarps + warp) * a.num_tokens * kTile, a.num_tokens);
    }

    eet::barrier(1, kReaders);
    const int n = first + output;
    if (mine(n)) {
      const float* from = partial + (output / kTile * kWarps * a.num_tokens + token) * kTile + output % kTile;
      float sum = bias;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += from[i * a.num_tokens * kTile];
      const T value = eet::from_float<T>(eet::activate(sum, a.act) + residual);
      if (a.out) a.out[token * int64_t(a.N) + n] = value;
      if (a.best) best = max(best, eet::pair(eet::to_float(value), n));
    }
    if (first + kGroup >= end) break;
    bias = bias_of(n + kGroup);
    residual = residual_of(n + kGroup);
    eet::barrier(1, kReaders);
  }
  if (!a.best) return;

  // A token's outputs belong to neighbouring threads: to half a warp, or to several.
  constexpr int kWidth = kGroup < 32 ? kGroup : 32, kShare = kGroup / kWidth;
  uint64_t* bests = reinterpret_cast<uint64_t*>(shared);
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, step));
  eet::barrier(1, kReaders);  // nobody reads activations any more
  if (threadIdx.x % kWidth == 0) bests[threadIdx.x / kWidth] = best;
  eet::barrier(1, kReaders);
  if (threadIdx.x < a.num_tokens) {
    best = 0;
    for (int i = 0; i < kShare; ++i) best = max(best, bests[threadIdx.x * kShare + i]);
    a.best[threadIdx.x * gridDim.x + blockIdx.x] = best;
  }
}

// Rows in shared memory are an odd number of 64 bytes apart: the 8 rows that a warp reads lie in different banks.
template <typename T>
int row_stride(int K) {
  return (eet::ceil_div(K * int(sizeof(T)), 64) | 1) * 64 / int(sizeof(T));
}

template <typename T, int kTokens>
cudaError_t launch_linear(LinearArgs<T> a, int num_blocks, bool dependent, cudaStream_t stream) {
  constexpr int kLogWarps = ::kLogWarps<kTokens>;
  a.log_team = kLogWarps;
  while (a.log_team && 1 << (kLogWarps - a.log_team) < a.num_tokens) --a.log_team;
  a.stride = row_stride<T>(a.K);
  // Stages of equal size, of 1 to 2 KiB for each output: smaller copies do not reach the rate of memory.
  const int most_inputs = 2048 / int(sizeof(T));
  a.stage_inputs = eet::ceil_div(eet::ceil_div(a.K, eet::ceil_div(a.K, most_inputs)), 32) * 32;
  const int num_outputs = eet::ceil_div(a.N, num_blocks);
  a.stage_rows = min(kTile, num_outputs);
  const int stage = eet::Ring::bytes(1, a.stage_rows * a.stage_stride());
  const int needed = eet::ceil_div(num_outputs, kTile) * eet::ceil_div(a.K, a.stage_inputs);
  const int others = a.x_bytes() + a.partial_floats(kTiles<kTokens>, 1 << kLogWarps) * int(sizeof(float));
  // As much as lets two kernels share a multiprocessor, so that this one's weights arrive while the one ahead still works.
  const int whole = eet::device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), half = whole / 2 - 1024;
  a.num_stages = min(((others + min(needed, 2) * stage <= half ? half : whole - 1024) - others) / stage, needed);
  if (a.num_stages < 1) return cudaErrorInvalidValue;
  return eet::launch(linear_kernel<T, kTokens>, {dim3(num_blocks), kReaders<kTokens> + 32,
                                                 others + a.num_stages * stage, stream, 1, dependent}, a);
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for at most 16 tokens; `best` gets each block's largest output of a token.
extern "C" cudaError_t eet_linear(void* out, void* best, const void* x, const int64_t* at, const void* weight,
                                  const void* bias, const void* residual, const void* norm_weight,
                                  const void* norm_bias, int dtype, int T, int N, int K, int act, float eps,
                                  int blocks, int dependent, cudaStream_t stream) {
  if (T > kMaxTokens || blocks > N) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    const LinearArgs<Type> a{static_cast<Type*>(out), static_cast<uint64_t*>(best), in(x), at, in(weight), in(bias),
                             in(residual), {in(norm_weight), in(norm_bias), eps}, T, N, K, act};
    return T <= 8 ? launch_linear<Type, 8>(a, blocks, dependent, stream)
                  : launch_linear<Type, 16>(a, blocks, dependent, stream);
  });
}
