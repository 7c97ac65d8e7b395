// Sums and maxima over the lanes of a warp, barriers among some of a block's warps, and fast exponentials.
#pragma once

#include <cstdint>

namespace eet {

// Over groups of `width` neighbouring lanes, which all get the result.
template <int width = 32>
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <int width = 32>
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = width / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// A barrier of `num_threads` threads; ids 1 to 15 are free (0 is __syncthreads).
__device__ inline void barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

constexpr float kLog2e = 1.4426950408889634f;  // exp(x) is 2^(kLog2e * x)

// 2^x in one instruction, good to 2 ulp; exp2_of(-inf) is 0.
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float exp_of(float x) { return exp2_of(x * kLog2e); }

}  // namespace eet
