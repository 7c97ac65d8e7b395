// Linear layers of up to eight tokens, in 16 bits: weights stream through shared memory, once, and activations lie in
// registers. T tokens, N outputs, K inputs.
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/register_norm.cuh"
#include "eet/register_product.cuh"
#include "eet/vector_product.cuh"

namespace {

constexpr int kLeastRows = 5;  // outputs of a stage, unless a block has fewer
constexpr int kWarps = 8;      // that multiply; one more fills the ring
constexpr int kReaders = 32 * kWarps;
constexpr int kEach = 2, kMostOutputs = 32 * kEach;  // outputs of a token that a lane finishes, and its warp
constexpr int kLeastCopy = 1792;                     // bytes of a row: the copy engine is hardly faster with less
// A block has 288 threads. This many, twice, leave each 80 registers: of a quarter of the multiprocessor three of its
// warps take 7,680 of 16,384 registers, and two of attention's warps find room beside them.
constexpr int kBounds = 384;

template <typename T>
using RegisterArgs = eet::RegisterArgs<T, kWarps>;
template <typename T>
using RegisterNorm = eet::RegisterNorm<T, kWarps>;
template <typename T, bool kNormed>
using RegisterProducts = eet::RegisterProducts<T, kWarps, kNormed>;

// Why      for eight tokens activations and their norm are as much as several stages of weights, and what is copied to
//          shared memory, normalized there and read again takes longer than the products
// Mapping  a block a multiprocessor, each with an equal share of the outputs; one warp keeps a ring of stages filled,
//          from before the kernel ahead has ended; a stage is 5 to 8 outputs, and each of 8 warps has an eighth of its
//          inputs: it loads those of all tokens into registers, and normalizes them there
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 100 KiB on their way a multiprocessor
// Needs    K a multiple of 8, and at most 1792 with a norm; at most 8 tokens, and 64 outputs a block
// Numerics tensor cores; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   ours; the fragments as in vector_linear.cu
template <typename T, bool kNormed>
__global__ void __launch_bounds__(kBounds, eet::kResident)
    register_linear_kernel(const __grid_constant__ RegisterArgs<T> a) {
  extern __shared__ __align__(128) uint4 shared[];  // the copy engine fills whole lines sooner
  eet::let_next_begin();
  float* partial = reinterpret_cast<float*>(shared);
  char* home = reinterpret_cast<char*>(shared) + a.sums_bytes();
  char* stages = home + (kNormed ? a.norm_bytes() : 0);
  const int stage_bytes = a.tile * a.stage_stride;
  const eet::Ring ring{stages, reinterpret_cast<uint64_t*>(stages + a.num_stages * stage_bytes), a.num_stages,
                       stage_bytes};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const eet::Share share(a);

  if (threadIdx.x == kReaders) ring.init(kWarps);
  __syncthreads();
  if (warp == kWarps) {
    eet::WeightStream stream(ring, a.stage_stride);
    stream.add(eet::InOrder(), a.weight, a.N, a.K, share.begin, share.end, a.tile, a.steps);
    return;
  }
  // A warp finishes the outputs of one token.
  eet::Outputs<T, T, kEach> outputs(a, warp, share, 32);
  outputs.request_bias(share.begin + lane);
  const RegisterNorm<T> norm(a.norm, a.K, home);
  if (kNormed) norm.request();
  const RegisterProducts<T, kNormed> products(a, ring, partial);
  eet::wait_for_previous();
  outputs.request_residual(share.begin + lane);
  products.multiply(norm, share);

  eet::barrier(1, kReaders);
  if (warp >= a.num_tokens) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int output = lane + 32 * i, tile = output / a.tile;
    if (!outputs.has(share.begin + output)) break;
    const float* from = partial + tile * a.sums() + warp * eet::kStageRows + output - tile * a.tile;
    float part[kWarps], sum = 0;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) part[j] = from[j * a.num_tokens * eet::kStageRows];
#pragma unroll
    for (float one : part) sum += one;
    outputs.finish(sum, share.begin + output, i);
  }
}

// Cuts the stages so that they bring most bytes on their way in `room` bytes.
template <typename T>
eet::RingPlan cut(RegisterArgs<T>& a, int room) {
  eet::RingPlan best{};
  int best_ahead = 0;
  const int num_chunks = eet::ceil_div(a.K, eet::kChunk), in_one = kWarps * eet::kMostChunks;
  const bool single = num_chunks <= in_one;
  const int least_steps = single ? 1 : eet::ceil_div(num_chunks, kWarps * eet::kAheadChunks);
  if (a.norm.weight && num_chunks > kWarps * eet::kNormChunks) return {};
  RegisterArgs<T> c = a;
  for (c.tile = eet::kStageRows; c.tile >= kLeastRows; --c.tile) {
    c.num_tiles = eet::ceil_div(c.most_outputs(), c.tile);
    for (int num = least_steps; num <= (single ? 1 : num_chunks); ++num) {
      c.steps = eet::cut_inputs(c.K, num);
      const int row_bytes = c.steps.most_chunks() * eet::kChunk * int(sizeof(T));
      if (num > least_steps && row_bytes < kLeastCopy) break;
      c.stage_stride = eet::odd_stride(row_bytes);
      const int others = c.sums_bytes() + c.norm_bytes(), stage = eet::Ring::bytes(1, c.tile * c.stage_stride);
      const int needed = c.num_tiles * num, fitting = room > others ? (room - others) / stage : 0;
      c.num_stages = min(fitting, needed);
      const int ahead = fitting >= needed ? INT_MAX : c.num_stages * c.tile * row_bytes;
      // A tile takes the readers as long whatever it holds, so more of them have to be worth it.
      if (ahead - best_ahead <= best_ahead / 10) continue;
      a = c, best_ahead = ahead, best = {others + c.num_stages * stage, c.num_stages, needed, c.tile * row_bytes};
    }
  }
  return best;
}

// Bytes of shared memory that a block takes; 0: it does not fit.
template <typename T>
int plan(RegisterArgs<T>& a) {
  return eet::paired_or_alone(a.residual, [&](int room) { return cut(a, room); });
}

template <typename T>
cudaError_t launch_register_linear(RegisterArgs<T> a, int num_blocks, bool dependent, cudaStream_t stream) {
  const int bytes = plan(a);
  if (!bytes) return cudaErrorInvalidValue;
  const auto kernel = a.norm.weight ? register_linear_kernel<T, true> : register_linear_kernel<T, false>;
  return eet::launch(kernel, {dim3(num_blocks), kReaders + 32, bytes, stream, 1, dependent}, a);
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for at most eight tokens.
extern "C" cudaError_t eet_register_linear(void* out, const void* x, const void* weight, const void* bias,
                                           const void* residual, const void* norm_weight, const void* norm_bias,
                                           int dtype, int T, int N, int K, int act, float eps, int num_blocks,
                                           int dependent, cudaStream_t stream) {
  if (T < 1 || T > eet::kRegisterTokens || num_blocks < 1 || num_blocks > N) return cudaErrorInvalidValue;
  if (eet::ceil_div(N, num_blocks) > kMostOutputs) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const RegisterArgs<Type> a(out, nullptr, x, nullptr, weight, bias, residual, norm_weight, norm_bias, T, N, K, act,
                               eps, num_blocks);
    return launch_register_linear<Type>(a, num_blocks, dependent, stream);
  });
}
