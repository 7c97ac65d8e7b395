// Floats as unsigned numbers of the same order, alone or with where they stand: what arg-max and selection compare.
#pragma once

#include <cstdint>

namespace eet {

// -0 counts as 0.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Of two pairs the larger has the larger value or, where they tie, the lower word.
__device__ inline uint64_t pair(float value, int word) { return uint64_t(ordered(value)) << 32 | ~uint32_t(word); }

__device__ inline int word_of(uint64_t pair) { return int(~uint32_t(pair)); }

__device__ inline float value_of(uint64_t pair) {
  const uint32_t key = pair >> 32;
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

__device__ inline uint64_t warp_max(uint64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

}  // namespace eet
