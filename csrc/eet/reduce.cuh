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

// Arrives at it without waiting, by whole warps; `num_threads` counts those that arrive and those that wait.
__device__ inline void arrive_at_barrier(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Over a block of kThreads, each with the sum of its own and all before it; the same sums in the same order every time.
// Sums of floats may fall from one thread to the next by rounding. Between two calls stands a barrier.
template <int kThreads, typename T>
__device__ T running_sum(T mine) {
  __shared__ T of_warp[kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T before = __shfl_up_sync(0xffffffffu, mine, step);
    if (lane >= step) mine += before;
  }
  if (lane == 31) of_warp[warp] = mine;
  __syncthreads();
  T before = lane < warp ? of_warp[lane] : T(0);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(0xffffffffu, before, step);
  return before + mine;
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
