// Linears of up to 16 tokens whose warps share stages of 16 outputs: sizes, the check of a plan, and what a block keeps
// in shared memory. T tokens, N outputs, K inputs.
#pragma once

#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/linear.cuh"

namespace eet {

constexpr int kTile = 16;  // outputs that a warp computes at a time
template <int kTokens>
constexpr int kLogWarps = kTokens == 8 ? 4 : 3;  // that multiply, as was measured; one more fills the ring
template <int kTokens>
constexpr int kReaders = 32 << kLogWarps<kTokens>;
template <int kTokens>
constexpr int kTiles = kReaders<kTokens> / kTile / kTokens;  // between two reductions: an output for each thread

template <typename T, typename W>
struct TileArgs : LinearArgs<T, W> {
  using LinearArgs<T, W>::LinearArgs;
  using Activation = T;
  using Weight = W;
  int stride, log_team;  // of a token in shared memory; warps that share a token's norm
  int stage_rows, stage_inputs, num_stages;

  // Bytes; an odd number of 64, so that the 8 outputs that a warp reads at a time lie in different banks.
  __host__ __device__ int stage_stride() const { return (stage_inputs * int(sizeof(W)) / 64 | 1) * 64; }
  __host__ __device__ int stage_bytes() const { return stage_rows * stage_stride(); }
  __host__ __device__ int x_bytes() const {
    return (this->num_tokens * stride + (this->norm.weight ? 2 * this->K : 0)) * sizeof(T);
  }
  __host__ __device__ int partial_floats(int tiles, int warps) const {
    return tiles * warps * kTile * this->num_tokens;
  }
};

// What Python plans of shared memory (eet_lab/ops/cuda/plan.py), as in TileArgs.
struct TilePlan {
  int stride, stage_rows, stage_inputs, num_stages, shared_bytes;
};

// Whether the plan has room for what the block keeps. A warp multiplies `chunk` inputs of a stage at a time, and reads
// `chunk_bytes` of the activations.
template <int kTokens, typename T, typename W>
bool take_plan(TileArgs<T, W>& a, const TilePlan& plan, int chunk, int chunk_bytes) {
  constexpr int kWarps = 1 << kLogWarps<kTokens>;
  a.log_team = kLogWarps<kTokens>;
  while (a.log_team && kWarps >> a.log_team < a.num_tokens) --a.log_team;
  a.stride = plan.stride, a.stage_rows = plan.stage_rows, a.stage_inputs = plan.stage_inputs;
  a.num_stages = plan.num_stages;
  const int row_bytes = ceil_div(a.K * int(sizeof(T)), chunk_bytes) * chunk_bytes;
  if (plan.stride < row_bytes / int(sizeof(T)) || plan.stride > plan.shared_bytes / int(sizeof(T))) return false;
  if (plan.stride * sizeof(T) % 16 || plan.stage_rows > kTile) return false;
  if (plan.stage_rows < min(kTile, a.most_outputs())) return false;
  if (plan.stage_inputs < chunk || plan.stage_inputs % chunk || plan.stage_inputs > plan.shared_bytes) return false;
  const int others = a.x_bytes() + a.partial_floats(kTiles<kTokens>, kWarps) * int(sizeof(float));
  return Ring::fits(plan.num_stages, a.stage_bytes(), plan.shared_bytes - others);
}

// What a block has in shared memory: activations, then what warps leave of their sums, then the ring.
template <typename T, int kTokens>
struct TileBlock {
  static constexpr int kWarps = 1 << kLogWarps<kTokens>;
  T* rows;         // [T,stride], behind them the norm's weights and biases
  float* partial;  // [tiles][warps][T][kTile]
  Ring ring;

  template <typename W>
  __device__ TileBlock(const TileArgs<T, W>& a, uint4* shared) {
    rows = reinterpret_cast<T*>(shared);
    partial = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + a.x_bytes());
    char* stages = reinterpret_cast<char*>(partial + a.partial_floats(kTiles<kTokens>, kWarps));
    uint64_t* barriers = reinterpret_cast<uint64_t*>(stages + a.num_stages * a.stage_bytes());
    ring = {stages, barriers, a.num_stages, a.stage_bytes()};
  }

  __device__ float* partial_of(int tile, int warp, int num_tokens) const {
    return partial + (tile * kWarps + warp) * num_tokens * kTile;
  }

  // Of a token's output, which is counted from the group's first.
  __device__ float sum(int output, int token, int num_tokens) const {
    const float* from = partial + (output / kTile * kWarps * num_tokens + token) * kTile + output % kTile;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += from[i * num_tokens * kTile];
    return sum;
  }
};

// By lane 4g+t, what two mma left of out^T[16 outputs, tokens]: `whole(half, i)` is value i of tokens 8*half to 8*half+7.
template <int kHalves, typename Whole>
__device__ void store_fragments(float* partial, int num_tokens, Whole whole) {  // [tokens][kTile]
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = half * 8 + t * 2 + i % 2;
      if (token < num_tokens) partial[token * kTile + g + i / 2 * 8] = whole(half, i);
    }
  }
}

// The scales of weights that have none.
struct NoScales {
  template <typename Args>
  __device__ explicit NoScales(const Args&) {}
  __device__ static float whole(int, bool) { return 1.f; }
  __device__ static void request(int64_t, int64_t, int) {}
  __device__ static float2 requested() { return make_float2(1.f, 1.f); }
};

// All that a block of threads does. Part: a warp's part of a tile's sums, to which it adds kChunk inputs at a time; lane
// 4g+t has 16 bytes of the weights of outputs g and g + 8. kChunks: so many chunks of inputs are under way at a time.
template <int kTokens, typename Part, typename Scales, int kChunks = 2, typename Args, typename Choice = Largest>
__device__ void multiply_tiles(const Args& a, uint4* shared, Choice choice = Choice()) {
  using T = typename Args::Activation;
  using W = typename Args::Weight;
  constexpr int kThreads = kReaders<kTokens>, kWarps = kThreads / 32, kEach = 16 / int(sizeof(W));
  constexpr int kGroup = kTiles<kTokens> * kTile;  // outputs between two reductions
  const TileBlock<T, kTokens> block(a, shared);
  const int warp = threadIdx.x / 32;
  const Share share(a, Choice::kGated ? 2 : 1);
  const int begin = share.begin, end = share.end;

  if (threadIdx.x == kThreads) block.ring.init(kWarps);
  __syncthreads();
  if (warp == kWarps) {
    stream_weights(choice, block.ring, a, share, kTile, a.stage_inputs, a.stage_stride());
    return;
  }
  const int token = threadIdx.x / kGroup, output = threadIdx.x % kGroup;
  Outputs<T, W, 1, Choice> outputs(a, token, share, 0, choice);
  Scales scales(a);
  float scale = scales.whole(begin + output, outputs.has(begin + output));
  outputs.request_bias(begin + output);
  RowStager<kWarps, T, kTokens> stager(a.num_tokens, a.log_team, a.K, a.stride, a.norm,
                                       block.rows + a.num_tokens * a.stride);
  stager.request_norm();
  let_next_begin();
  wait_for_previous();
  outputs.request_residual(begin + output);
  stager.stage(block.rows, a.x, a.at);
  choice.prepare(a.num_tokens);
  barrier(1, kThreads);

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  RingPlace place;
  int chunk = 0;  // counts those of all stages, so that the warps have equally many
#pragma unroll 1
  for (int first = begin; first < end; first += kGroup) {
#pragma unroll 1
    for (int tile = 0; tile < kTiles<kTokens> && first + tile * kTile < end; ++tile) {
      const int num_rows = min(kTile, end - first - tile * kTile);
      Part part(block.rows, a.stride, a.num_tokens);
#pragma unroll 1
      for (int k = 0; k < a.K; k += a.stage_inputs, place.step(a.num_stages)) {
        // Past the last output and the last input the last is read again: there the activation is 0, and here nothing is
        // stored.
        const int num_inputs = min(a.stage_inputs, a.K - k), num_chunks = (num_inputs + Part::kChunk - 1) / Part::kChunk;
        const auto request = [&](int i) {
          const int64_t n = first + tile * kTile;
          if (i < num_chunks) scales.request(n + min(g, num_rows - 1), n + min(g + 8, num_rows - 1), k + i * Part::kChunk);
        };
        request((warp - chunk) & (kWarps - 1));
        const char* stage = block.ring.wait(place);
        const W* low = reinterpret_cast<const W*>(stage + min(g, num_rows - 1) * a.stage_stride());
        const W* high = reinterpret_cast<const W*>(stage + min(g + 8, num_rows - 1) * a.stage_stride());
#pragma unroll kChunks
        for (int i = (warp - chunk) & (kWarps - 1); i < num_chunks; i += kWarps) {
          const int mine = i * Part::kChunk + t * kEach, at = min(mine, num_inputs - kEach);
          const float2 now = scales.requested();
          request(i + kWarps);
          part.add(load(low + at), load(high + at), now, k + mine, a.num_tokens);
        }
        block.ring.release(place);
        chunk += num_chunks;
      }
      part.store(block.partial_of(tile, warp, a.num_tokens), a.num_tokens);
    }

    barrier(1, kThreads);
    const int n = first + output;
    outputs.finish(outputs.has(n), [&] { return block.sum(output, token, a.num_tokens) * scale; }, n);
    if (first + kGroup >= end) break;
    scale = scales.whole(n + kGroup, outputs.has(n + kGroup));
    outputs.request(n + kGroup);
    barrier(1, kThreads);
  }
  uint64_t* scratch = reinterpret_cast<uint64_t*>(shared);
  if (!Choice::kGated && a.best) leave_best(outputs.best, a.best, a.num_tokens, kGroup, kThreads, scratch);
}

}  // namespace eet
