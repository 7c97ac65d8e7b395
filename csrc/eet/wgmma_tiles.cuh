// Products of some tens of tokens in 16 bits, in tiles (sm_90a): what a block of threads has in shared memory, the thread
// that fills its ring, the warp that holds what is added to sums, and what becomes of these. T tokens, N outputs, K inputs.
#pragma once

#include "eet/cluster.cuh"
#include "eet/dependent.cuh"
#include "eet/linear.cuh"
#include "eet/tensor_map.cuh"

namespace eet {

constexpr int kTileInputs = 64, kTileRowBytes = 2 * kTileInputs;  // of a stage, of one output or token: a row of wgmma.cuh
constexpr int kTileRows = 64, kMostOutputs = 2 * kTileRows;       // outputs of a product, and of a stage
constexpr int kTileGroups = 2;                                    // warpgroups that multiply, one stage each in turn
constexpr int kLogTileWarps = 3, kTileWarps = 1 << kLogTileWarps, kTileReaders = 32 * kTileWarps;
constexpr int kMostTileTokens = 64, kMostLogCluster = 2;

template <typename T>
struct WgmmaArgs : LinearArgs<T, T> {
  using LinearArgs<T, T>::LinearArgs;
  CUtensorMap weights, inputs;
  int log_cluster = 0, tile = 0, num_stages = 0;  // tile: outputs of a stage
  // Bytes of shared memory; sums lie behind the stages, or over them, and behind them a cluster's mailbox.
  int sums_at = 0, held_at = 0, barriers_at = 0;

  int num_tiles() const { return ceil_div(this->most_outputs(), tile); }
  __host__ __device__ int num_steps() const { return (this->K + kTileInputs - 1) / kTileInputs; }
  __host__ __device__ int tile_bytes() const { return (tile + 7) / 8 * 8 * kTileRowBytes; }
  __host__ __device__ int stage_bytes() const { return tile_bytes() + (this->num_tokens + 7) / 8 * 8 * kTileRowBytes; }
  // From token to token, in floats: the fragments of a warp lie in different banks.
  __host__ __device__ int sum_stride() const { return (tile + 31) / 32 * 32 + 4; }
  __host__ __device__ int group_sums() const { return this->num_tokens * sum_stride(); }
  // What each block of a cluster is sent by each, of the tokens that it finishes.
  __host__ __device__ int each() const { return (this->num_tokens + (1 << log_cluster) - 1) >> log_cluster; }
  __host__ __device__ int sent_sums() const { return each() * sum_stride(); }
};

// What a block adds up: outputs in tiles, and its part of the inputs in steps, which stages hold in this order. Clusters
// begin with different steps, so that they do not all ask for the same activations at once.
struct TilePart {
  int begin, end, tile, first, steps, n, step, done = 0;

  template <typename T>
  __device__ explicit TilePart(const WgmmaArgs<T>& a) : tile(a.tile) {
    const int cluster = blockIdx.x >> a.log_cluster, rank = blockIdx.x & ((1 << a.log_cluster) - 1);
    begin = n = cluster * a.share + min(cluster, a.rest);
    end = begin + a.share + (cluster < a.rest);
    first = a.num_steps() * rank >> a.log_cluster;
    steps = (a.num_steps() * (rank + 1) >> a.log_cluster) - first;
    step = cluster % steps;
  }
  __device__ bool has_more() const { return n < end; }
  __device__ int input() const { return (first + step) * kTileInputs; }
  __device__ void next() {
    if (++step == steps) step = 0;
    if (++done == steps) done = 0, n += tile;
  }
};

// By one thread. Weights are asked for before the kernel ahead has ended, activations are not.
template <typename T>
__device__ void fill_ring(const WgmmaArgs<T>& a, const Ring& ring) {
  const int bytes = (a.tile + a.num_tokens) * kTileRowBytes;  // zeros from outside of a matrix count too
  const auto ask_weights = [&](const TilePart& at, RingPlace place) {
    expect_bytes(ring.filled(place), bytes);
    load_box_once(ring.stages + place.stage * ring.stage_bytes, a.weights, {at.input(), 0, at.n, 0},
                       ring.filled(place));
  };
  const auto ask_inputs = [&](const TilePart& at, RingPlace place) {
    load_box(ring.stages + place.stage * ring.stage_bytes + a.tile_bytes(), a.inputs, {at.input(), 0, 0, 0},
                  ring.filled(place));
  };
  TilePart ahead(a), at(a);
  for (int stage = 0; stage < a.num_stages && ahead.has_more(); ++stage, ahead.next()) ask_weights(ahead, {stage, 0});
  wait_for_previous();
  for (int stage = 0; stage < a.num_stages && at.has_more(); ++stage, at.next()) ask_inputs(at, {stage, 0});
  for (RingPlace place{0, 1}; at.has_more(); at.next(), place.step(a.num_stages)) {
    barrier_wait(ring.emptied(place), place.parity ^ 1);
    ask_weights(at, place);
    ask_inputs(at, place);
  }
}

// The tokens that a block finishes.
struct TileTokens {
  int first, last;

  template <typename T>
  __device__ TileTokens(const WgmmaArgs<T>& a, int rank) {
    first = min(rank * a.each(), a.num_tokens);
    last = min(first + a.each(), a.num_tokens);
  }
  template <typename T>
  __device__ explicit TileTokens(const WgmmaArgs<T>& a) : TileTokens(a, blockIdx.x & ((1 << a.log_cluster) - 1)) {}
};

// By one warp, for outputs n to n + num_rows: what is added to their sums. held [1 + tokens,tile]: biases, and residuals.
template <typename T>
__device__ void hold_bias(const WgmmaArgs<T>& a, T* held, int n, int num_rows) {
  for (int i = threadIdx.x % 32; i < num_rows; i += 32) held[i] = a.bias ? a.bias[n + i] : T(0.f);
}
template <typename T>
__device__ void hold_residual(const WgmmaArgs<T>& a, T* held, int n, int num_rows) {
  const TileTokens tokens(a);
  const int end = a.residual ? (tokens.last - tokens.first) * num_rows : 0;
#pragma unroll 8
  for (int i = threadIdx.x % 32; i < end; i += 32) {
    const int token = i / num_rows, output = i - token * num_rows;
    held[(1 + token) * a.tile + output] = a.residual[(tokens.first + token) * int64_t(a.N) + n + output];
  }
}

// By one warp: what is added to each tile's sums, at a time when others finish none. A cluster has one tile.
template <typename T>
__device__ void hold_tiles(const WgmmaArgs<T>& a, T* held) {
  const TilePart at(a);
  hold_bias(a, held, at.begin, min(a.tile, at.end - at.begin));
  wait_for_previous();
  for (int n = at.begin; n < at.end; n += a.tile) {
    const int num_rows = min(a.tile, at.end - n);
    if (n > at.begin) hold_bias(a, held, n, num_rows);
    hold_residual(a, held, n, num_rows);
    if (a.log_cluster) {
      __syncwarp();
      if (kWaitsTogether) cluster_arrive();
      cluster_wait();  // as the others do before they wait for this warp: racecheck takes one's wait for all's
    }
    barrier(1, kTileReaders + 32);
    if (!a.log_cluster) barrier(1, kTileReaders + 32);
  }
}

// By one thread, before its block arrives at the cluster's barrier: for what the others send of the tokens that it finishes.
template <typename T>
__device__ void open_for_sums(const WgmmaArgs<T>& a, uint64_t* counter) {
  const TileTokens tokens(a);
  const int others = (1 << a.log_cluster) - 1;
  open_mailbox(counter, others * (tokens.last - tokens.first) * a.sum_stride() * int(sizeof(float)));
}

// By all that multiply, when all blocks of the cluster have, since mailboxes lie over stages: the sums of both warpgroups, to
// who finishes their tokens. mail [blocks,sent_sums]. To read others' sums would take a fence of all memory (LOG).
template <typename T>
__device__ void send_sums(const WgmmaArgs<T>& a, const float* sums, float* mail, uint64_t* counter) {
  const int log_warps = kLogTileWarps - a.log_cluster, warp = threadIdx.x / 32;
  const int rank = warp >> log_warps, mine = blockIdx.x & ((1 << a.log_cluster) - 1);
  const TileTokens tokens(a, rank);
  const int quads = a.sum_stride() / 4, end = (tokens.last - tokens.first) * quads;
  const float4* const from = reinterpret_cast<const float4*>(sums) + tokens.first * quads;
  float4* const here = reinterpret_cast<float4*>(mail + mine * a.sent_sums());
  const uint32_t there = at_block(here, rank), its_counter = at_block(counter, rank);
#pragma unroll 1
  for (int i = threadIdx.x & ((32 << log_warps) - 1); i < end; i += 32 << log_warps) {
    float4 sum = from[i];
    const float4 other = from[i + a.group_sums() / 4];
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    if (rank == mine) {
      here[i] = sum;
    } else {
      send(there + i * int(sizeof(float4)), sum, its_counter);
    }
  }
}

// By all that multiply: outputs n to n + num_rows of the block's tokens, from sums in 2 or 4 parts. What a block does once
// waits for its instructions, so each activation has a short loop over tokens.
template <int kEach, typename T>
__device__ void finish(const WgmmaArgs<T>& a, const float* sums, int num_parts, int part, const T* held, int n,
                       int num_rows) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const TileTokens tokens(a);
  float bias[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) bias[i] = to_float(held[min(lane + 32 * i, num_rows - 1)]);
  by_activation(a.act, [&](auto known) {
    const float* from = sums + warp * a.sum_stride() + lane;
    const T* residual = held + (1 + warp) * a.tile + lane;
    T* to = a.out + (tokens.first + warp) * int64_t(a.N) + n + lane;
#pragma unroll 1
    for (int left = tokens.last - tokens.first - warp; left > 0; left -= kTileWarps) {
      float x[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        x[i] = from[32 * i] + from[32 * i + part];
        if (num_parts > 2) x[i] += from[32 * i + 2 * part] + from[32 * i + 3 * part];
        x[i] = activate<decltype(known)::value>(x[i] + bias[i]);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (lane + 32 * i >= num_rows) break;
        to[32 * i] = from_float<T>(a.residual ? x[i] + to_float(residual[32 * i]) : x[i]);
      }
      from += kTileWarps * a.sum_stride(), residual += kTileWarps * a.tile, to += kTileWarps * int64_t(a.N);
    }
  });
}

}  // namespace eet
