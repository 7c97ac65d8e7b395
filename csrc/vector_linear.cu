// Linear layers of one or two tokens, in 16 bits: weights stream through shared memory, once. T tokens, N outputs,
// K inputs.
#include <climits>

#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/linear.cuh"
#include "eet/mma.cuh"

namespace {

constexpr int kMostRows = 8, kLeastRows = 5;                // outputs of a stage: a tile
constexpr int kTeams = 4, kTeamWarps = 4;                   // teams take stages in turn, and split a stage's inputs
constexpr int kLogWarps = 4, kWarps = kTeams * kTeamWarps;  // that multiply; one more fills the ring
constexpr int kReaders = 32 * kWarps;
constexpr int kChunk = 32;  // inputs in one step of a warp
constexpr int kMostTokens = 2;
constexpr int kMostPartials = 16 * 1024;  // bytes of sums that wait in shared memory to be added up
constexpr int kLeastCopy = 1920;          // bytes of a row: the copy engine takes as long for smaller ones (LOG)

template <typename T>
struct VectorArgs : eet::LinearArgs<T, T> {
  using eet::LinearArgs<T, T>::LinearArgs;
  int stride;                 // of a token in shared memory
  int steps, stage_inputs;    // stages that share the inputs of a tile; inputs of one
  int tile, stage_stride;     // outputs of a stage; bytes between them
  int num_stages, num_tiles;  // in the ring; tiles between two reductions

  __host__ __device__ int sums() const { return kMostRows * kTeamWarps * this->num_tokens; }  // that a stage leaves
};

// A warp's part of out^T[8 outputs, tokens]: of a stage's chunks every fourth.
// Lane 4g+t reads 16 bytes of output g, and those are the fragment A of an mma as they come: its rows g and g + 8 are
// both output g, the first with the words x and z of the four, the second with y and w. So of the product with the
// activations' (x, z) the upper half is output g, and of that with (y, w) the lower; the other halves are of no use.
// The activations' words wait in the order x, z, y, w.
template <typename T>
struct Product {
  static constexpr int kStep = kTeamWarps * kChunk, kChains = 2;  // sums that do not wait for each other
  float upper[kChains][4] = {}, lower[kChains][4] = {};

  // `row`: the lane's output in the stage; `x`: the lane's token from the stage's first input on; `last`: the stage's
  // last vector. Past it the last is read again: there the activations are 0.
  __device__ void add(uint32_t row, uint32_t x, int last) {
    const int first = threadIdx.x / 32 % kTeamWarps * kChunk, lane = threadIdx.x % 4 * eet::kVec<T>;
    x += (first + lane) * int(sizeof(T));
#pragma unroll 2
    for (int k = first; k <= last; k += kChains * kStep) {
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain, x += kStep * int(sizeof(T))) {
        if (chain && k + kStep > last) break;
        const uint4 w = eet::load_shared(row + min(k + chain * kStep + lane, last) * int(sizeof(T)));
        const uint4 v = eet::load_shared(x);
        eet::mma<T>(upper[chain], w.x, w.y, w.z, w.w, v.x, v.y);
        eet::mma<T>(lower[chain], w.x, w.y, w.z, w.w, v.z, v.w);
      }
    }
  }

  __device__ void store(float* partial, int num_tokens) {  // [kMostRows][tokens][kTeamWarps]
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (t) return;
#pragma unroll
    for (int token = 0; token < kMostTokens; ++token) {
      const float sum = (upper[0][token] + lower[0][2 + token]) + (upper[1][token] + lower[1][2 + token]);
      if (token < num_tokens) partial[(g * num_tokens + token) * kTeamWarps] = sum;
    }
  }
};

// Why      a decode step reads every weight once for one token: the time is the bytes over the bandwidth, and what
//          passes between the wait for the kernel ahead and the last store
// Mapping  a block a multiprocessor, each with an equal share of the outputs; one warp keeps a ring of stages filled,
//          from before the kernel ahead has ended; a stage is 5 to 8 outputs and belongs to a team of 4 warps, so that
//          a warp meets a barrier once for a quarter of a stage; the sums of all stages meet in shared memory
// Traffic  N*K weights once, T*K activations a block (from L2), T*N out; 100 KiB on their way a multiprocessor
// Needs    K a multiple of 8, T <= 2, T*K activations and 2*K of a norm in shared memory
// Numerics tensor cores; fp32 sums; norm, bias, activation, residual in fp32, rounded once
// Source   fragments read as they lie in memory: after Frantar et al. 2024, MARLIN, without its quantization
template <typename T>
__global__ void __launch_bounds__(kReaders + 32, eet::kResident)
    vector_linear_kernel(const __grid_constant__ VectorArgs<T> a) {
  extern __shared__ uint4 shared[];
  eet::let_next_begin();
  float* partial = reinterpret_cast<float*>(shared);
  T* rows = reinterpret_cast<T*>(partial + a.num_tiles * a.steps * a.sums());
  T* norms = rows + a.num_tokens * a.stride;
  char* stages = reinterpret_cast<char*>(norms + (a.norm.weight ? 2 * a.K : 0));
  const int stage_bytes = a.tile * a.stage_stride;
  const eet::Ring ring{stages, reinterpret_cast<uint64_t*>(stages + a.num_stages * stage_bytes), a.num_stages,
                       stage_bytes};
  const int warp = threadIdx.x / 32;
  const eet::Share share(a);

  if (threadIdx.x == kReaders) ring.init(kTeamWarps);
  __syncthreads();
  if (warp == kWarps) {
    eet::stream_weights(ring, a, share, a.tile, a.stage_inputs, a.stage_stride);
    return;
  }
  // The thread's output, and what is added to it: on its way before it is needed.
  const int group = kReaders / a.num_tokens, token = threadIdx.x / group, output = threadIdx.x % group;
  eet::Outputs<T, T> outputs(a, token, share);
  outputs.request_bias(share.begin + output);
  const int its_tile = output / a.tile, its_sums = ((output - its_tile * a.tile) * a.num_tokens + token) * kTeamWarps;
  eet::RowStager<kWarps, T, kMostTokens, true> stager(a.num_tokens, kLogWarps + 1 - a.num_tokens, a.K, a.stride, a.norm,
                                                      norms);
  stager.request_norm();
  // A team's next stage: of the block's tile `tile` the inputs of step `step`. Its place in the ring is the team's own.
  eet::RingPlace place{warp / kTeamWarps};
  int tile = 0, step = warp / kTeamWarps;
  const auto settle = [&] {
    for (; step >= a.steps; step -= a.steps) ++tile;
  };
  settle();
  eet::wait_for_previous();
  stager.stage(rows, a.x, a.at);
  eet::barrier(1, kReaders);
  outputs.request_residual(share.begin + output);

  const int g = threadIdx.x % 32 / 4, batch = a.num_tiles * a.tile;
  // Past the last token the last, again; such sums are never read.
  const uint32_t x = eet::shared_address(rows + min(g, a.num_tokens - 1) * a.stride);
  const uint32_t ring_at = eet::shared_address(stages);
#pragma unroll 1
  for (int first = share.begin, base = 0; first < share.end; first += batch, base += a.num_tiles) {
    const int last = min(first + batch, share.end);
#pragma unroll 1
    while (share.begin + tile * a.tile < last) {
      const int from = step * a.stage_inputs, num_rows = min(a.tile, share.end - share.begin - tile * a.tile);
      Product<T> part;
      eet::barrier_wait(ring.filled(place), place.parity);
      part.add(ring_at + place.stage * stage_bytes + min(g, num_rows - 1) * a.stage_stride, x + from * int(sizeof(T)),
               min(a.stage_inputs, a.K - from) - eet::kVec<T>);
      ring.release(place);
      part.store(partial + ((tile - base) * a.steps + step) * a.sums() + warp % kTeamWarps, a.num_tokens);
      place.step(a.num_stages, kTeams);
      step += kTeams;
      settle();
    }

    eet::barrier(1, kReaders);
    const int n = first + output;
    if (outputs.has(n) && n < last) {
      const float* from = partial + its_tile * a.steps * a.sums() + its_sums;
      float sum = 0;
      for (int i = 0; i < a.steps; ++i, from += a.sums()) {
        const float4 part = *reinterpret_cast<const float4*>(from);
        sum += (part.x + part.y) + (part.z + part.w);
      }
      outputs.finish(sum, n);
    }
    if (last == share.end) break;
    outputs.request(n + batch);
    eet::barrier(1, kReaders);
  }
  uint64_t* scratch = reinterpret_cast<uint64_t*>(shared);
  if (a.best) eet::leave_best(outputs.best, a.best, a.num_tokens, group, kReaders, scratch);
}

// Cuts the stages so that they bring most bytes on their way, and says how many of `room` bytes all takes; 0: it does
// not fit.
template <typename T>
int cut(VectorArgs<T>& a, int room, int least_copy) {
  int best_bytes = 0, best_ahead = 0;
  const int x_bytes = (a.num_tokens * a.stride + (a.norm.weight ? 2 * a.K : 0)) * int(sizeof(T));
  VectorArgs<T> c = a;
  for (c.tile = kMostRows; c.tile >= kLeastRows; --c.tile) {
    const int tiles = eet::ceil_div(c.most_outputs(), c.tile);
    for (c.steps = eet::ceil_div(c.K * int(sizeof(T)), 4096);; ++c.steps) {
      c.stage_inputs = eet::ceil_div(eet::ceil_div(c.K, c.steps), kChunk) * kChunk;
      const int row_bytes = c.stage_inputs * int(sizeof(T)), sums_bytes = c.steps * c.sums() * int(sizeof(float));
      if (c.steps > 1 && row_bytes < least_copy) break;
      if ((c.steps - 1) * c.stage_inputs >= c.K) continue;  // rounded up, fewer steps cover all inputs
      c.stage_stride = eet::odd_stride(row_bytes);
      c.num_tiles = max(1, min(min(kReaders / c.num_tokens / c.tile, tiles), kMostPartials / sums_bytes));
      const int others = c.num_tiles * sums_bytes + x_bytes, stage = eet::Ring::bytes(1, c.tile * c.stage_stride);
      const int needed = tiles * c.steps, fitting = room > others ? (room - others) / stage : 0;
      c.num_stages = fitting >= needed ? needed : fitting / kTeams * kTeams;  // a place in the ring belongs to one team
      const int ahead = fitting >= needed ? INT_MAX : c.num_stages * c.tile * row_bytes;
      if (ahead > best_ahead) a = c, best_ahead = ahead, best_bytes = others + c.num_stages * stage;
    }
  }
  return best_bytes;
}

template <typename T>
cudaError_t launch_vector_linear(VectorArgs<T> a, int num_blocks, bool dependent, cudaStream_t stream) {
  a.stride = eet::odd_stride(a.K * sizeof(T)) / sizeof(T);
  const int paired = eet::paired_shared(a.residual);
  int bytes = cut(a, paired, kLeastCopy) ? paired : 0;
  if (!bytes) bytes = cut(a, eet::whole_shared(), kLeastCopy);
  if (!bytes) bytes = cut(a, eet::whole_shared(), 128);
  if (!bytes) return cudaErrorInvalidValue;
  return eet::launch(vector_linear_kernel<T>, {dim3(num_blocks), kReaders + 32, bytes, stream, 1, dependent}, a);
}

}  // namespace

// out = act(norm(x) weight^T + bias) + residual, for one or two tokens; `best` gets each block's largest of a token.
extern "C" cudaError_t eet_vector_linear(void* out, void* best, const void* x, const int64_t* at, const void* weight,
                                         const void* bias, const void* residual, const void* norm_weight,
                                         const void* norm_bias, int dtype, int T, int N, int K, int act, float eps,
                                         int blocks, int dependent, cudaStream_t stream) {
  if (T < 1 || T > kMostTokens || blocks > N) return cudaErrorInvalidValue;
  return eet::by_half_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const VectorArgs<Type> a(out, best, x, at, weight, bias, residual, norm_weight, norm_bias, T, N, K, act, eps,
                             blocks);
    return launch_vector_linear<Type>(a, blocks, dependent, stream);
  });
}
