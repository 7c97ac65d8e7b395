// Rows of activations, copied into shared memory and normalized there, by a whole block.
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

// The sum over a team of `team_warps` neighbouring warps; `scratch` holds a float for each warp of the block.
__device__ inline float team_sum(float x, int team_warps, float* scratch) {
  const int warp = threadIdx.x / 32, first = warp - warp % team_warps;
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) scratch[warp] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < team_warps; ++i) sum += scratch[first + i];
  return sum;
}

// rows[t][c] = norm(x[t])[c] for t < T and c < C, and 0 up to `stride`. The block has kWarps >= T warps; a row belongs to
// a team of them. Mean and variance are fp32, in two passes. The caller synchronizes before it reads what others wrote.
template <int kWarps, typename T>
__device__ inline void stage_rows(T* rows, int stride, const T* x, int num_rows, int C, Norm<T> norm) {
  __shared__ float scratch[2][kWarps];
  int team_warps = kWarps;
  while (kWarps / team_warps < num_rows) team_warps /= 2;
  const int num_lanes = team_warps * 32, lane = threadIdx.x % num_lanes, row = threadIdx.x / num_lanes;
  const bool mine = row < num_rows;
  T* to = rows + row * stride;
  const T* from = x + int64_t(row) * C;
  const int first = lane * kVec<T>, step = num_lanes * kVec<T>, end = mine ? C : 0;

  // The first vectors of weight and bias are on their way while the statistics are computed.
  uint4 weight = zeros(), bias = zeros();
  if (norm.weight && first < end) weight = load(norm.weight + first);
  if (norm.bias && first < end) bias = load(norm.bias + first);

  float sum = 0, part[kVec<T>];
  for (int c = first; c < end; c += step) {
    const uint4 v = load(from + c);
    store(to + c, v);
    unpack<T>(v, part);
    for (float value : part) sum += value;
  }
  for (int c = C + first; c < stride && mine; c += step) store(to + c, zeros());
  if (!norm.weight) return;

  const float mean = norm.bias ? team_sum(sum, team_warps, scratch[0]) / C : 0.f;
  float squares = 0;
  for (int c = first; c < end; c += step) {
    unpack<T>(load(to + c), part);
    for (float value : part) squares += (value - mean) * (value - mean);
  }
  const float scale = rsqrtf(team_sum(squares, team_warps, scratch[1]) / C + norm.eps);

  for (int c = first; c < end; c += step) {
    float w[kVec<T>], b[kVec<T>];
    unpack<T>(c == first ? weight : load(norm.weight + c), w);
    unpack<T>(c == first || !norm.bias ? bias : load(norm.bias + c), b);
    unpack<T>(load(to + c), part);
    for (int i = 0; i < kVec<T>; ++i) part[i] = (part[i] - mean) * scale * w[i] + (norm.bias ? b[i] : 0.f);
    store(to + c, pack<T>(part));
  }
}

}  // namespace eet
