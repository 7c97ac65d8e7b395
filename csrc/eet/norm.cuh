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

// A sum over a team of 2^log_team neighbouring warps; `scratch` holds a float for each warp of the block.
__device__ inline float team_sum(float x, int log_team, float* scratch) {
  const int warp = threadIdx.x / 32, others = (1 << log_team) - 1;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) scratch[warp] = x;
  __syncthreads();
  // Every lane takes one of the team's sums, so each comes 32 / 2^log_team times.
  return warp_sum(scratch[(warp & ~others) + (threadIdx.x & others)]) * (1.f / 32) * (1 << log_team);
}

// Copies num_rows rows of C numbers from x [T,C], for instance to shared memory, `stride` apart, normalized, and 0 from C
// up to `stride`. A row belongs to a team of 2^log_team of the block's 2^kLogWarps warps, which suffice for all rows. Mean and variance are fp32, in two passes.
// What a thread reads first is requested by the constructor, so that other work can begin meanwhile.
// The loops are not unrolled: a kernel that runs for microseconds pays for every instruction that it has to fetch.
template <int kLogWarps, typename T>
class RowStager {
 public:
  __device__ RowStager(const T* x, int num_rows, int log_team, int C, int stride, Norm<T> norm)
      : C(C), stride(stride), log_team(log_team), norm(norm) {
    row = threadIdx.x >> (5 + log_team);
    first = (threadIdx.x & ((32 << log_team) - 1)) * kVec<T>;
    step = kVec<T> << (5 + log_team);
    end = row < num_rows ? C : 0;
    from = x + int64_t(row) * C;
    if (first < end) first_x = load(from + first);
  }

  // For after the requests that matter more.
  __device__ void request_norm() {
    if (!norm.weight) return;
    if (first < end) weight = load(norm.weight + first);
    if (first < end && norm.bias) bias = load(norm.bias + first);
  }

  // The caller synchronizes before it reads what others wrote.
  __device__ void stage(T* rows) {
    __shared__ float scratch[2][1 << kLogWarps];
    T* to = rows + row * stride;
    float sum = 0, squares = 0, x[kVec<T>];
#pragma unroll 1
    for (int c = first; c < end; c += step) {
      const uint4 v = c == first ? first_x : load(from + c);
      store(to + c, v);
      unpack<T>(v, x);
      for (float value : x) sum += value;
    }
#pragma unroll 1
    for (int c = C + first; end && c < stride; c += step) store(to + c, zeros());
    if (!norm.weight) return;

    const float mean = norm.bias ? __fdividef(team_sum(sum, log_team, scratch[0]), C) : 0.f;
#pragma unroll 1
    for (int c = first; c < end; c += step) {
      unpack<T>(load(to + c), x);
      for (float value : x) squares += (value - mean) * (value - mean);
    }
    const float scale = rsqrtf(__fdividef(team_sum(squares, log_team, scratch[1]), C) + norm.eps);
#pragma unroll 1
    for (int c = first; c < end; c += step) {
      float w[kVec<T>], b[kVec<T>];
      unpack<T>(load(to + c), x);
      unpack<T>(c == first ? weight : load(norm.weight + c), w);
      unpack<T>(c == first || !norm.bias ? bias : load(norm.bias + c), b);
      for (int i = 0; i < kVec<T>; ++i) x[i] = (x[i] - mean) * scale * w[i] + (norm.bias ? b[i] : 0.f);
      store(to + c, pack<T>(x));
    }
  }

 private:
  int C, stride, log_team, row, first, step, end;
  const T* from;
  Norm<T> norm;
  uint4 first_x = zeros(), weight = zeros(), bias = zeros();
};

}  // namespace eet
