// Linears of up to 16 tokens whose warps share stages of 16 outputs: sizes, the plan of a launch, and what a block keeps
// in shared memory. T tokens, N outputs, K inputs.
#pragma once

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

// Cuts the stages, of equal size and a multiple of `chunk` inputs, and says how many bytes a block takes; 0: too many.
// `pairs`: two blocks have enough registers to share a multiprocessor.
template <int kTokens, typename T, typename W>
int plan_tiles(TileArgs<T, W>& a, int stride, int chunk, bool pairs) {
  constexpr int kWarps = 1 << kLogWarps<kTokens>;
  a.log_team = kLogWarps<kTokens>;
  while (a.log_team && kWarps >> a.log_team < a.num_tokens) --a.log_team;
  a.stride = stride;
  // 1 to 2 KiB for each output: the copy engine takes as long for less (LOG).
  const int most_inputs = 2048 / int(sizeof(W));
  a.stage_inputs = ceil_div(ceil_div(a.K, ceil_div(a.K, most_inputs)), chunk) * chunk;
  a.stage_rows = min(kTile, a.most_outputs());
  const int stage = Ring::bytes(1, a.stage_bytes());
  const int needed = ceil_div(a.most_outputs(), kTile) * ceil_div(a.K, a.stage_inputs);
  const int others = a.x_bytes() + a.partial_floats(kTiles<kTokens>, kWarps) * int(sizeof(float));
  const auto plan = [&](int room) -> RingPlan {
    a.num_stages = min((room - others) / stage, needed);
    return {a.num_stages < 1 ? 0 : others + a.num_stages * stage, a.num_stages, needed, a.stage_bytes()};
  };
  return pairs ? paired_or_alone(a.residual, plan) : plan(whole_shared()).bytes;
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

}  // namespace eet
