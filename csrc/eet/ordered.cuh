// Floats as unsigned numbers of the same order, alone or with where they stand: what arg-max and selection compare.
#pragma once

#include <cstdint>

namespace eet {

// -0 counts as 0.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline float of_ordered(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// Of two pairs the larger has the larger value or, where they tie, the lower token.
__device__ inline uint64_t pair(float value, int token) { return uint64_t(ordered(value)) << 32 | ~uint32_t(token); }

__device__ inline int word_of(uint64_t pair) { return int(~uint32_t(pair)); }

__device__ inline float value_of(uint64_t pair) {
  return of_ordered(pair >> 32);
}

__device__ inline uint64_t warp_max(uint64_t x) {
  const uint32_t high = __reduce_max_sync(0xffffffffu, uint32_t(x >> 32));
  const uint32_t low = __reduce_max_sync(0xffffffffu, uint32_t(x >> 32) == high ? uint32_t(x) : 0u);
  return uint64_t(high) << 32 | low;
}

// Over a block of kThreads, for all of them.
template <int kThreads>
__device__ uint64_t block_max(uint64_t x) {
  __shared__ uint64_t of_warp[kThreads / 32];
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(of_warp[threadIdx.x % (kThreads / 32)]);
}

}  // namespace eet
