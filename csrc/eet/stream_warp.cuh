// What one warp does with keys and values in shared memory: 16 keys at a time, from scores to softmax and outputs. D head
// dim; g and t number a lane: 4g + t.
#pragma once

#include <cmath>

#include "eet/attention.cuh"
#include "eet/mma.cuh"
#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kWarpKeys = 16;  // of a stage that are one warp's
constexpr int kPieces = 4;     // of a stage's keys, and of its values

// A stage: kWarps * 16 keys, in four pieces that follow each other in the cache, then their values. Of each piece four
// keys are one warp's. Pieces lie 32 bytes further apart than a multiple of 128: keys are read without bank conflicts, and
// values two at a time.
template <int kDim, int kWarps>
struct KeyStage {
  static constexpr int kKeys = kWarps * kWarpKeys, kPiece = kKeys / kPieces;
  static constexpr int kRowBytes = kDim * 2, kPieceBytes = kPiece * kRowBytes + 32;
  static constexpr int kValues = kPieces * kPieceBytes, kBytes = 2 * kValues;  // where values begin; of all

  // Where the stage's key k lies, and which of a warp's keys is the stage's.
  __device__ static constexpr int offset(int k) { return k / kPiece * kPieceBytes + k % kPiece * kRowBytes; }
  __device__ static constexpr int key(int warp, int i) { return i / 4 * kPiece + warp * 4 + i % 4; }
};

// Products by tensor cores: scores [head g, key] = q[16 heads (8 used), D] * keys^T, in whatever order of the inner
// dimension the 16 bytes of a lane give; outputs [channel, head] = values^T * weights^T.
template <typename T, int kDim, int kWarps>
class StreamWarp {
 public:
  using Stage = KeyStage<kDim, kWarps>;
  static constexpr int kSteps = kDim / 32, kBlocks = kDim / 16;  // inputs of a key by four lanes; channels of an mma

  // `exponent`: of scores, in units of log2(e).
  __device__ explicit StreamWarp(float exponent) : exponent(exponent), slack(8 / exponent) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    key_at = Stage::offset(Stage::key(warp, key_in(0, g))) + t * 16;
    value_at = Stage::kValues + Stage::offset(Stage::key(warp, key_in(lane / 16, lane % 8))) + lane / 8 % 2 * 16;
  }

  // The warp's key in a column of the first or second half of an mma: the order suits the banks.
  __device__ static constexpr int key_in(int half, int column) {
    return 4 * (column / 2 ^ column % 2 * 2) + 2 * half + column % 2;
  }
  // Of the warp's keys, the four whose scores this lane has.
  __device__ int key_of(int i) const { return key_in(i / 2, 2 * t + i % 2); }

  __device__ void load_query(const T* from) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) q[i] = load(from + i * 32 + t * 8);
  }

  template <typename Rotation, typename Prepared>
  __device__ void rotate_query(const Rotation& rotation, const Prepared& prepared) {
    rotation.query(q, prepared, t);
  }

  // At the edges of what a row sees: values of hidden keys become 0, since what lies there may be no number, and their
  // scores weigh nothing. `hidden`: whether the warp's key i is.
  template <typename Hidden>
  __device__ void hide_values(uint32_t stage, const Hidden& hidden) const {
    constexpr int kChunks = kDim / 8;
    const int warp = threadIdx.x / 32;
    for (int i = threadIdx.x % 32; i < kWarpKeys * kChunks; i += 32) {
      const uint32_t value = stage + Stage::kValues + Stage::offset(Stage::key(warp, i / kChunks)) + i % kChunks * 16;
      if (hidden(i / kChunks)) store_shared(value, zeros());
    }
  }
  template <typename Hidden>
  __device__ void hide_scores(const Hidden& hidden, float (&score)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) score[i] = hidden(key_of(i)) ? -INFINITY : score[i];
  }

  // score[i]: head g against key_of(i).
  __device__ void multiply_keys(uint32_t stage, float (&score)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float c[2][4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint4 k = load_shared(stage + key_at + half * 2 * Stage::kRowBytes + i * 64);
        mma<T>(c[0], q[i].x, 0, q[i].y, 0, k.x, k.y);
        mma<T>(c[1], q[i].z, 0, q[i].w, 0, k.z, k.w);
      }
      score[half * 2] = c[0][0] + c[1][0];
      score[half * 2 + 1] = c[0][1] + c[1][1];
    }
  }

  // Scores become weights, 2^(exponent * (score - max)). The maximum is an earlier one, and replaced only once a score
  // is 2^8 times as heavy.
  __device__ void weigh(float (&score)[4]) {
    const float best = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    if (__any_sync(0xffffffffu, best > max + slack)) {
      const float new_max = fmaxf(max, warp_max<4>(best));
      const float shrink = exp2_of((max - new_max) * exponent);
      const float of_even = __shfl_sync(0xffffffffu, shrink, t * 8);  // of the lane's outputs: heads 2t and 2t+1
      const float of_odd = __shfl_sync(0xffffffffu, shrink, t * 8 + 4);
      max = new_max;
      sum[0] *= of_even, sum[1] *= of_odd;
#pragma unroll
      for (auto& c : out) c[0] *= of_even, c[1] *= of_odd, c[2] *= of_even, c[3] *= of_odd;
    }
    const float offset = -max * exponent;
#pragma unroll
    for (float& s : score) s = exp2_of(fmaf(s, exponent, offset));
  }

  // Returns a number that needs all values.
  __device__ uint32_t multiply_values(uint32_t stage, const float (&weight)[4]) {
    const uint32_t b0 = pack2<T>(weight[0], weight[1]), b1 = pack2<T>(weight[2], weight[3]);
    const uint32_t ones = pack2<T>(1.f, 1.f);
    uint32_t all = 0, v[4];
    mma<T>(sum, ones, 0, ones, 0, b0, b1);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      load_matrices_transposed(v, stage + value_at + i * 32);
      mma<T>(out[i], v[0], v[1], v[2], v[3], b0, b1);
      all |= v[3];
    }
    return all;
  }

  // Its outputs [num_heads][D], not yet divided by the sums, and for each head the maximum in units of log2(e), and the
  // sum.
  __device__ void leave(float* outs, float2* stats, int num_heads) const {
    if (t == 0) stats[g].x = max * exponent;
    if (g == 0) stats[2 * t].y = sum[0], stats[2 * t + 1].y = sum[1];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int head = 2 * t + j % 2;
        if (head < num_heads) outs[head * kDim + i * 16 + j / 2 * 8 + g] = out[i][j];
      }
    }
  }

 private:
  uint4 q[kSteps];
  float out[kBlocks][4] = {}, sum[4] = {};  // sum: of weights, for heads 2t and 2t+1
  float exponent, slack, max = kUnscored;
  uint32_t key_at, value_at;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
};

}  // namespace eet
