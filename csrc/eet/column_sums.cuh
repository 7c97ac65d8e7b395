// Sums over all rows of a matrix, such as the gradient of a bias, in two stages: each block of a kernel leaves a row of
// its own sums, and these are added up here. No atomics: two runs give the same bits.
#pragma once

#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kSumWidth = 32;  // columns of a block

template <typename T>
struct ColumnSums {
  T* out[2];             // [C] each; null: nobody wants it
  const float* partial;  // [2,R,C], or [R,C] for the first alone
  int R, C;
};

// Why      the second stage: few rows, which one more kernel adds up in a fixed order
// Mapping  a block 32 columns, a warp every 32nd row: grid C / 32 x sums; it may begin before the first stage has ended
// Traffic  4*R*C bytes read
// Needs    nothing
// Numerics fp32, rounded once
// Source   the two stages of Apex's and Liger-Kernel's layer norms
template <typename T>
__global__ void __launch_bounds__(kSumWidth * 32) column_sums_kernel(const ColumnSums<T> a) {
  __shared__ float sums[32][kSumWidth + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * kSumWidth + lane;
  T* const out = blockIdx.y ? a.out[1] : a.out[0];
  wait_for_previous();  // whoever follows relies on the first stage having ended, even where nothing is summed
  if (!out) return;
  const float* const partial = a.partial + int64_t(blockIdx.y) * a.R * a.C;
  float sum = 0.f;
  if (column < a.C) {
#pragma unroll 8
    for (int row = warp; row < a.R; row += 32) sum += partial[int64_t(row) * a.C + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  sum = warp_sum(sums[lane][warp]);
  const int mine = blockIdx.x * kSumWidth + warp;
  if (lane == 0 && mine < a.C) out[mine] = from_float<T>(sum);
}

template <typename T>
cudaError_t sum_columns(const ColumnSums<T>& a, cudaStream_t stream) {
  if (!a.out[0] && !a.out[1]) return cudaSuccess;
  const dim3 grid(ceil_div(a.C, kSumWidth), a.out[1] ? 2 : 1);
  const bool dependent = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  return launch(column_sums_kernel<T>, {grid, kSumWidth * 32, 0, stream, 1, dependent}, a);
}

}  // namespace eet
