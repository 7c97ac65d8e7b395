// What the attention kernels share: where things lie. B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#pragma once

#include <cstdint>

#include "eet/reduce.cuh"

namespace eet {

// One layer's keys or values [B,G,K,D]; the last dimension is contiguous.
template <typename T>
struct Cache {
  T* start;
  int64_t row, head, column;  // strides, in numbers

  __device__ T* at(int b, int g, int k) const { return start + b * row + g * head + k * column; }
};

// A token's queries, then keys, then values: [(H+2G)D].
struct Heads {
  int H, G, D;

  __device__ int64_t width() const { return int64_t(H + 2 * G) * D; }
  __device__ int64_t query(int64_t token, int h) const { return token * width() + h * D; }
  __device__ int64_t key(int64_t token, int g) const { return token * width() + (H + g) * D; }
  __device__ int64_t value(int64_t token, int g) const { return token * width() + (H + G + g) * D; }
};

// The maximum of no scores: finite, so that differences of maxima are numbers, and below every score.
constexpr float kLowest = -3.4028234e38f;

// 1/x in one instruction, good to 1 ulp.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace eet
