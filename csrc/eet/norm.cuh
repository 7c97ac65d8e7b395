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

// Copies num_rows rows of C numbers from x [T,C], for instance to shared memory, `stride` apart, normalized, and 0 from C up to `stride`.
// The block has kWarps warps, at least as many as rows; a row belongs to a team of them. Mean and variance are fp32, in
// two passes. What a thread reads first is requested by the constructor, so that other work can begin meanwhile.
template <int kWarps, typename T>
class RowStager {
 public:
  __device__ RowStager(const T* x, int num_rows, int C, int stride, Norm<T> norm) : C(C), stride(stride), norm(norm) {
    while (kWarps / team_warps < num_rows) team_warps /= 2;
    const int num_lanes = team_warps * 32;
    row = threadIdx.x / num_lanes;
    first = threadIdx.x % num_lanes * kVec<T>;
    step = num_lanes * kVec<T>;
    end = row < num_rows ? C : 0;
    from = x + int64_t(row) * C;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = first + i * step < end ? load(from + first + i * step) : zeros();
    if (norm.weight && first < end) weight = load(norm.weight + first);
    if (norm.bias && first < end) bias = load(norm.bias + first);
    for (int c = first + step; norm.weight && c < end; c += step) {
      prefetch(norm.weight + c);
      if (norm.bias) prefetch(norm.bias + c);
    }
  }

  // The caller synchronizes before it reads what others wrote.
  __device__ void stage(T* rows) {
    __shared__ float scratch[2][kWarps];
    T* to = rows + row * stride;
    float mean = 0, scale = 1;
    if (norm.weight) {
      if (norm.bias) {
        float sum = 0;
        each([&](int, uint4 v) { sum += sum_of(v, 0.f, false); });
        mean = team_sum(sum, team_warps, scratch[0]) / C;
      }
      float squares = 0;
      each([&](int, uint4 v) { squares += sum_of(v, mean, true); });
      scale = rsqrtf(team_sum(squares, team_warps, scratch[1]) / C + norm.eps);
    }
    each([&](int c, uint4 v) { store(to + c, norm.weight ? normalized(c, v, mean, scale) : v); });
    for (int c = C + first; end && c < stride; c += step) store(to + c, zeros());
  }

 private:
  static constexpr int kHeld = 4;  // vectors of the row that a thread keeps in registers; more are read again
  int C, stride, team_warps = kWarps, row, first, step, end;
  const T* from;
  Norm<T> norm;
  uint4 held[kHeld], weight = zeros(), bias = zeros();

  template <typename Use>
  __device__ void each(Use use) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * step < end) use(first + i * step, held[i]);
    }
    for (int c = first + kHeld * step; c < end; c += step) use(c, load(from + c));
  }

  __device__ static float sum_of(uint4 v, float mean, bool squared) {
    float part[kVec<T>], sum = 0;
    unpack<T>(v, part);
#pragma unroll
    for (float x : part) sum += squared ? (x - mean) * (x - mean) : x;
    return sum;
  }

  __device__ uint4 normalized(int c, uint4 v, float mean, float scale) const {
    float x[kVec<T>], w[kVec<T>], b[kVec<T>];
    unpack<T>(v, x);
    unpack<T>(c == first ? weight : load(norm.weight + c), w);
    unpack<T>(c == first || !norm.bias ? bias : load(norm.bias + c), b);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) x[i] = (x[i] - mean) * scale * w[i] + (norm.bias ? b[i] : 0.f);
    return pack<T>(x);
  }
};

}  // namespace eet
