// Rows of activations, copied and normalized on the way by a whole block.
#pragma once

#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace eet {

// A layer norm, or an RMS norm where there is no bias, or nothing where there is no weight.
template <typename T>
struct Norm {
  const T* weight;  // [C]
  const T* bias;    // [C]
  float eps;
};

// A sum over a team of 2^log_team neighbouring warps of 2^kLogWarps; `scratch` holds a float for each warp.
template <int kLogWarps>
__device__ inline float team_sum(float x, int log_team, float* scratch) {
  const int warp = threadIdx.x / 32, others = (1 << log_team) - 1;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) scratch[warp] = x;
  barrier(1, 32 << kLogWarps);
  // Every lane takes one of the team's sums, so each comes 32 / 2^log_team times.
  return warp_sum(scratch[(warp & ~others) + (threadIdx.x & others)]) * (1.f / 32) * (1 << log_team);
}

// Copies num_rows rows of C numbers from x [T,C] (row i is row at[i], if there is `at`), for instance to shared memory,
// `stride` apart, normalized, and 0 from C up to `stride`. The block's first 2^kLogWarps warps do it; a row belongs to a
// team of 2^log_team of them; at most two rows come to a warp. Mean and variance are fp32, in two passes.
// The loops are not unrolled: a kernel that runs for microseconds pays for every instruction that it has to fetch.
template <int kLogWarps, typename T, int kMaxRows = 1>
class RowStager {
 public:
  __device__ RowStager(int num_rows, int log_team, int C, int stride, Norm<T> norm)
      : num_rows(num_rows), log_team(log_team), C(C), stride(stride), norm(norm) {
    first = (threadIdx.x & ((32 << log_team) - 1)) * kVec<T>;
    step = kVec<T> << (5 + log_team);
  }

  // What does not depend on x, to be on its way while x is waited for.
  __device__ void request_norm() {
    if (!norm.weight) return;
    if (first < C) weight = load(norm.weight + first);
    if (first < C && norm.bias) bias = load(norm.bias + first);
  }

  // The caller synchronizes before it reads what others wrote.
  __device__ void stage(T* rows, const T* x, const int64_t* at = nullptr) {
    const int row = threadIdx.x >> (5 + log_team);
    stage_row(rows, x, at, row);
    if (kMaxRows <= 1 << kLogWarps) return;
    barrier(1, 32 << kLogWarps);  // the sums of these rows have been read
    stage_row(rows, x, at, row + (1 << kLogWarps));
  }

 private:
  int num_rows, log_team, C, stride, first, step;
  Norm<T> norm;
  uint4 weight = zeros(), bias = zeros();

  __device__ void stage_row(T* rows, const T* x, const int64_t* at, int row) {
    __shared__ float scratch[2][1 << kLogWarps];
    const int end = row < num_rows ? C : 0;
    const T* from = x + (at && end ? at[row] : row) * int64_t(C);
    T* to = rows + row * stride;
    float sum = 0, squares = 0, values[kVec<T>];
    uint4 v = zeros();  // the last vector read: where a row has one for each thread, it is not read back
#pragma unroll 1
    for (int c = first; c < end; c += step) {
      v = load(from + c);
      store(to + c, v);
      unpack<T>(v, values);
      for (float value : values) sum += value;
    }
#pragma unroll 1
    for (int c = C + first; end && c < stride; c += step) store(to + c, zeros());
    if (!norm.weight) return;

    const bool single = step >= C;
    const float mean = norm.bias ? __fdividef(team_sum<kLogWarps>(sum, log_team, scratch[0]), C) : 0.f;
#pragma unroll 1
    for (int c = first; c < end; c += step) {
      unpack<T>(single ? v : load(to + c), values);
      for (float value : values) squares += (value - mean) * (value - mean);
    }
    const float scale = rsqrtf(__fdividef(team_sum<kLogWarps>(squares, log_team, scratch[1]), C) + norm.eps);
#pragma unroll 1
    for (int c = first; c < end; c += step) {
      float w[kVec<T>], b[kVec<T>];
      unpack<T>(single ? v : load(to + c), values);
      unpack<T>(c == first ? weight : load(norm.weight + c), w);
      unpack<T>(c == first || !norm.bias ? bias : load(norm.bias + c), b);
      for (int i = 0; i < kVec<T>; ++i) {
        values[i] = (values[i] - mean) * scale * w[i] + (norm.bias ? b[i] : 0.f);
      }
      store(to + c, pack<T>(values));
    }
  }
};

}  // namespace eet
