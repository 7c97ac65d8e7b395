// What the attention kernels share: where things lie. B rows, H heads, G KV heads, D head dim, K columns of the KV cache.
#pragma once

#include <climits>
#include <cstdint>

#include "eet/reduce.cuh"

namespace eet {

// Where the columns of a cache in pages lie: column k of row b is number k % page of page table[b * blocks + k / page].
// No table: of page b, which is as long as the cache.
struct Pages {
  const int* table;  // [B,blocks] or null
  int blocks, log_page;

  __device__ int page(int b, int k) const { return table ? table[b * blocks + (k >> log_page)] : b; }
  __device__ int place(int k) const { return table ? k & ((1 << log_page) - 1) : k; }
};

// One layer's keys or values [B,G,K,D], or in pages [P,G,page,D]; the last dimension is contiguous.
template <typename T>
struct Cache {
  T* start;
  int64_t row, head, column;  // strides, in numbers; `row` also of pages
  Pages pages;

  __device__ T* at(int b, int g, int k) const {
    return start + pages.page(b, k) * row + g * head + pages.place(k) * column;
  }
};

// A token's queries, then keys, then values: [(H+2G)D].
struct Heads {
  int H, G, D;

  __device__ int64_t width() const { return int64_t(H + 2 * G) * D; }
  __device__ int64_t query(int64_t token, int h) const { return token * width() + h * D; }
  __device__ int64_t key(int64_t token, int g) const { return token * width() + (H + g) * D; }
  __device__ int64_t value(int64_t token, int g) const { return token * width() + (H + G + g) * D; }
};

// A query sees so many keys at most, its own and those before it. No window is one that subtracted from any column leaves
// nothing of it.
inline int most_keys(int window) { return window > 0 ? window : INT_MAX; }

// The maximum of no scores: finite, so that differences of maxima are numbers, and below every score.
constexpr float kLowest = -3.4028234e38f;
// The same of scores that are yet to be scaled: finite times a scale up to 100. A power of two, so that its product is as
// exact as the scale, and slack is lost beside it.
constexpr float kUnscored = -0x1p120f;

// 1/x in one instruction, good to 1 ulp.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace eet
