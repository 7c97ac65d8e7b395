// Linear layers of few tokens: weights stream through shared memory, once. In 16 bits, one or two tokens are left to
// vector_linear.cu. T tokens, N outputs, K inputs.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/linear.cuh"
#include "eet/mma.cuh"

namespace {

constexpr int kTile = 16;  // outputs that a warp computes at a time
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
struct StreamArgs : eet::LinearArgs<T, T> {
  using eet::LinearArgs<T, T>::LinearArgs;
  int stride, log_team;  // of a token in shared memory; warps that share a token's norm
  int stage_rows, stage_inputs, num_stages;

  __host__ __device__ int stage_stride() const { return (stage_inputs * int(sizeof(T)) / 64 | 1) * 64; }
  __host__ __device__ int x_bytes() const {
    return (this->num_tokens * stride + (this->norm.weight ? 2 * this->K : 0)) * sizeof(T);
  }
  __host__ __device__ int partial_floats(int tiles, int warps) const {
    return tiles * warps * kTile * this->num_tokens;
  }
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
template <typename T, int kTokens>
__global__ void __launch_bounds__(kReaders<kTokens> + 32, kResident) linear_kernel(const StreamArgs<T> a) {
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
  const eet::Share share(a);
  const int begin = share.begin, end = share.end;

  if (threadIdx.x == kReaders) ring.init(kWarps);
  __syncthreads();
  if (warp == kWarps) {
    eet::stream_weights(ring, a, share, kTile, a.stage_inputs, a.stage_stride());
    return;
  }
  const int token = threadIdx.x / kGroup, output = threadIdx.x % kGroup;
  eet::Outputs<T, T> outputs(a, token, share);
  outputs.request_bias(begin + output);
  eet::RowStager<kWarps, T, kTokens> stager(a.num_tokens, a.log_team, a.K, a.stride, a.norm,
                                            rows + a.num_tokens * a.stride);
  stager.request_norm();
  eet::let_next_begin();
  eet::wait_for_previous();
  outputs.request_residual(begin + output);
  stager.stage(rows, a.x, a.at);
  eet::barrier(1, kReaders);

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  eet::RingPlace place;
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
    if (outputs.has(n)) {
      const float* from = partial + (output / kTile * kWarps * a.num_tokens + token) * kTile + output % kTile;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += from[i * a.num_tokens * kTile];
      outputs.finish(sum, n);
    }
    if (first + kGroup >= end) break;
    outputs.request_bias(n + kGroup);
    outputs.request_residual(n + kGroup);
    eet::barrier(1, kReaders);
  }
  uint64_t* scratch = reinterpret_cast<uint64_t*>(shared);
  if (a.best) eet::leave_best(outputs.best, a.best, a.num_tokens, kGroup, kReaders, scratch);
}

template <typename T, int kTokens>
cudaError_t launch_linear(StreamArgs<T> a, int num_blocks, bool dependent, cudaStream_t stream) {
  constexpr int kLogWarps = ::kLogWarps<kTokens>;
  a.log_team = kLogWarps;
  while (a.log_team && 1 << (kLogWarps - a.log_team) < a.num_tokens) --a.log_team;
  a.stride = eet::odd_stride(a.K * sizeof(T)) / sizeof(T);
  // Stages of equal size, of 1 to 2 KiB for each output: smaller copies do not reach the rate of memory.
  const int most_inputs = 2048 / int(sizeof(T));
  a.stage_inputs = eet::ceil_div(eet::ceil_div(a.K, eet::ceil_div(a.K, most_inputs)), 32) * 32;
  const int num_outputs = a.most_outputs();
  a.stage_rows = min(kTile, num_outputs);
  const int stage = eet::Ring::bytes(1, a.stage_rows * a.stage_stride());
  const int needed = eet::ceil_div(num_outputs, kTile) * eet::ceil_div(a.K, a.stage_inputs);
  const int others = a.x_bytes() + a.partial_floats(kTiles<kTokens>, 1 << kLogWarps) * int(sizeof(float));
  // As much as lets two kernels share a multiprocessor, so that this one's weights arrive while the one ahead still works.
  const bool fits_half = others + min(needed, 2) * stage <= eet::half_shared();
  a.num_stages = min(((fits_half ? eet::half_shared() : eet::whole_shared()) - others) / stage, needed);
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
  if (T > eet::kMaxTokens || blocks > N) return cudaErrorInvalidValue;
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const StreamArgs<Type> a(out, best, x, at, weight, bias, residual, norm_weight, norm_bias, T, N, K, act, eps,
                             blocks);
    return T <= 8 ? launch_linear<Type, 8>(a, blocks, dependent, stream)
                  : launch_linear<Type, 16>(a, blocks, dependent, stream);
  });
}
