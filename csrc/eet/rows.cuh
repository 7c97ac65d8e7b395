// Reductions over the rows of a matrix: a team of warps has X rows at a time and keeps them in registers between passes.
// T rows, C numbers a row.
//
// Batch reduction (Fang et al. 2021, TurboTransformers): one row's tree of shuffles and additions is a chain in which
// each waits for the one before. With X rows at once there are X chains to choose from, and one barrier for all of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace eet {

// kWidth numbers that are read and written together: 16 bytes, or one number where rows are not aligned to that.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Piece {
  T number[kWidth];
};

// Has the compiler convert these numbers again where they are needed again: as floats they would take twice the registers.
__device__ inline void keep_packed(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }
template <typename T, int kWidth>
__device__ inline void keep_packed(Piece<T, kWidth>& piece) {
  if constexpr (sizeof(piece) == sizeof(uint4)) keep_packed(reinterpret_cast<uint4&>(piece));
}

constexpr int kMaxLogTeam = 4;  // the warps of a team, and of a block, are at most 2^kMaxLogTeam
constexpr int kMaxLogFew = 3;   // the same where there are few rows

template <typename T, int kWidth, int X>
class Rows {
 public:
  // Pieces of each row in a thread's registers; what is beyond is read again in every pass.
  static constexpr int kHeld = X < 4 ? 4 : 3;
  using Pieces = Piece<T, kWidth>[X];

  // The team's rows; past the last row the last is taken again, and never written.
  __device__ Rows(T* out, const T* x, int T_, int C, int log_team) : out(out), x(x), num_rows(T_), C(C) {
    const int team = threadIdx.x >> (5 + log_team), teams = blockDim.x >> (5 + log_team);
    row = (blockIdx.x * teams + team) * X;
    first = (threadIdx.x & ((32 << log_team) - 1)) * kWidth;
    step = kWidth << (5 + log_team);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * step < C) read(first + i * step, held[i]);
    }
  }

  // Calls visit(c, pieces) for each of the thread's places in the row, with the X rows' pieces that begin at c.
  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (Piece<T, kWidth>& piece : held[i]) keep_packed(piece);
      if (first + i * step < C) visit(first + i * step, held[i]);
    }
#pragma unroll 1
    for (int c = first + kHeld * step; c < C; c += step) {
      Pieces pieces;
      read(c, pieces);
      visit(c, pieces);
    }
  }

  // Rounds and writes what the i-th row gets at c.
  __device__ void write(int c, int i, const float (&value)[kWidth]) const {
    if (row + i >= num_rows) return;
    Piece<T, kWidth> piece;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) piece.number[k] = from_float<T>(value[k]);
    *reinterpret_cast<Piece<T, kWidth>*>(out + int64_t(row + i) * C + c) = piece;
  }

  // Writes a number of each row to `to` [T], or nowhere.
  __device__ void keep(float* to, const float (&value)[X]) const {
    if (!to || first) return;
#pragma unroll
    for (int i = 0; i < X; ++i) {
      if (row + i < num_rows) to[row + i] = value[i];
    }
  }

 private:
  __device__ void read(int c, Pieces& pieces) const {
#pragma unroll
    for (int i = 0; i < X; ++i) {
      pieces[i] = *reinterpret_cast<const Piece<T, kWidth>*>(x + int64_t(min(row + i, num_rows - 1)) * C + c);
    }
  }

  T* out;
  const T* x;
  int num_rows, C, row, first, step;
  Pieces held[kHeld];
};

struct Sum {
  __device__ static float of(float a, float b) { return a + b; }
};

struct Max {
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

// X numbers at once, each combined over the lanes of a warp that differ in the bits below `width`.
template <typename Combine, int X>
__device__ inline void combine_lanes(float (&value)[X], int width) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    if (bit >= width) continue;
    float other[X];
#pragma unroll
    for (int i = 0; i < X; ++i) other[i] = __shfl_xor_sync(0xffffffffu, value[i], bit);
#pragma unroll
    for (int i = 0; i < X; ++i) value[i] = Combine::of(value[i], other[i]);
  }
}

// The same over a team of 2^log_team neighbouring warps; `scratch` is used for one such call in a kernel.
template <typename Combine, int X>
__device__ inline void combine_team(float (&value)[X], int log_team, float (&scratch)[1 << kMaxLogTeam][X]) {
  combine_lanes<Combine>(value, 32);
  if (log_team == 0) return;
  const int warp = threadIdx.x / 32, others = (1 << log_team) - 1;
#pragma unroll
  for (int i = 0; i < X; ++i) {
    if (threadIdx.x % 32 == i) scratch[warp][i] = value[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < X; ++i) value[i] = scratch[(warp & ~others) + (threadIdx.x & others)][i];
  combine_lanes<Combine>(value, 1 << log_team);
}

// How a kernel over rows is launched.
struct RowsGrid {
  int blocks, threads, log_team;
};

// The smallest team that can hold its rows in registers, and blocks of 4 warps. Where that leaves multiprocessors without
// a block: blocks of one team, whose threads have a piece of a row each, since a thread's pieces take turns.
inline RowsGrid rows_grid(int T, int C, int width, int X, int held) {
  int log_team = 0, log_block = 2;
  while (log_team < kMaxLogTeam && held * width << (5 + log_team) < C) ++log_team;
  if (ceil_div(T, X << 2) < device_attribute(cudaDevAttrMultiProcessorCount)) {
    log_block = 0;
    while (log_team < kMaxLogFew && width << (5 + log_team) < C) ++log_team;
  }
  if (log_block < log_team) log_block = log_team;
  return {ceil_div(T, X << (log_block - log_team)), 32 << log_block, log_team};
}

// Calls launch(std::integral_constant<int, X>()) for 1, 2 or 4 rows at a time.
template <typename Launch>
cudaError_t by_rows(int X, Launch launch) {
  switch (X) {
    case 1: return launch(std::integral_constant<int, 1>());
    case 2: return launch(std::integral_constant<int, 2>());
    case 4: return launch(std::integral_constant<int, 4>());
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace eet
