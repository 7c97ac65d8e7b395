// Rows of activations, copied and normalized on the way by a whole block.
#pragma once

#include "eet/exchange.cuh"
#include "eet/mma.cuh"
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

// Copies num_rows rows of C numbers from x [T,C] (row i is row at[i], if there is `at`) to shared memory, `stride` apart,
// normalized, and 0 from C up to `stride`. The block's first kWarps warps do it; a row belongs to a team of 2^log_team
// of them; at most two rows come to a warp. Mean and variance are fp32 and take one pass, in which the row's first number
// is taken away from all, so that a mean far from 0 costs no digits. Where that number itself lies far from the mean, a
// second pass around the mean gets the digits back.
// kSwap: the second and third of every four words change places, as fragments of an mma want them, and nothing is written
// behind C.
template <int kWarps, typename T, int kMaxRows, bool kSwap = false>
class RowStager {
 public:
  // `home` [2C]: where norm weights and biases wait in shared memory.
  __device__ RowStager(int num_rows, int log_team, int C, int stride, Norm<T> norm, T* home)
      : num_rows(num_rows), log_team(log_team), C(C), stride(stride), norm(norm), home(home) {
    first = (threadIdx.x & ((32 << log_team) - 1)) * kVec<T>;
    step = kVec<T> << (5 + log_team);
  }

  // What does not depend on x, to be on its way while x is waited for.
  __device__ void request_norm() {
    if (!norm.weight) return;
    for (int c = threadIdx.x * kVec<T>; c < C; c += kVec<T> * 32 * kWarps) {
      copy_async(home + c, norm.weight + c, true);
      if (norm.bias) copy_async(home + C + c, norm.bias + c, true);
    }
  }

  // The caller synchronizes before it reads what others wrote. kSent: x may be what other blocks are still sending
  // (exchange.cuh), if `sent`.
  template <bool kSent = false>
  __device__ void stage(T* rows, const T* x, const int64_t* at, bool sent = kSent) {
    static_assert(!kSent || kMaxRows <= kWarps, "who receives has one row");
    __shared__ float scratch[2][2][kWarps];
    const int row = threadIdx.x >> (5 + log_team);
    float shift = 0, shift_2 = 0;  // of what is sent the first number is another thread's
    if (kSent && sent) {
      receive(rows, x, row);
    } else {
      shift = copy(rows, x, at, row);
      if (kMaxRows > kWarps) shift_2 = copy(rows, x, at, row + kWarps);
      commit_copies();
    }
    wait_for_copies<0>();  // a thread reads the numbers of x that it copied itself
    if (!norm.weight) {
      if (kSwap) swap(rows, row);
      return;
    }
    normalize(rows, x, at, row, shift, scratch[0]);
    if (kMaxRows > kWarps) normalize(rows, x, at, row + kWarps, shift_2, scratch[1]);
  }

 private:
  int num_rows, log_team, C, stride, first, step;
  Norm<T> norm;
  T* home;

  __device__ const T* origin(const T* x, const int64_t* at, int row) const {
    return x + (at ? at[row] : row) * int64_t(C);
  }

  // Requests a row; returns its first number.
  __device__ float copy(T* rows, const T* x, const int64_t* at, int row) {
    if (row >= num_rows) return 0;
    const T* from = origin(x, at, row);
    T* to = rows + row * stride;
    for (int c = first; c < C; c += step) copy_async(to + c, from + c, true);
    if (!kSwap) pad(to);
    return norm.bias ? to_float(*from) : 0.f;
  }

  // Copies a row's numbers again until all have arrived.
  __device__ void receive(T* rows, const T* x, int row) {
    if (row >= num_rows) return;
    const T* from = x + row * int64_t(C);
    T* to = rows + row * stride;
    bool complete;
    for (int c = first; c < C; c += step) copy_async(to + c, from + c, true);
    if (!kSwap) pad(to);
    do {
      commit_copies();
      wait_for_copies<0>();
      complete = true;
      for (int c = first; c < C; c += step) {
        if (has_arrived(load(to + c))) continue;
        copy_async(to + c, from + c, true);
        complete = false;
      }
    } while (!complete);
  }

  __device__ void pad(T* to) const {
    for (int c = C + first; c < stride; c += step) store(to + c, zeros());
  }

  __device__ static uint4 arranged(uint4 v) { return kSwap ? make_uint4(v.x, v.z, v.y, v.w) : v; }

  __device__ void swap(T* rows, int row) {
    if (row >= num_rows) return;
#pragma unroll 2
    for (int c = first; c < C; c += step) store(rows + row * stride + c, arranged(load(rows + row * stride + c)));
  }

  __device__ void normalize(T* rows, const T* x_rows, const int64_t* at, int row, float shift,
                            float (&scratch)[2][kWarps]) {
    const int end = row < num_rows ? C : 0;
    T* to = rows + row * stride;
    float sum = 0, squares = 0, x[kVec<T>];
#pragma unroll 2
    for (int c = first; c < end; c += step) {
      unpack<T>(load(to + c), x);
      for (float value : x) {
        sum += value - shift;
        squares += (value - shift) * (value - shift);
      }
    }
    // The team's warps leave their sums; every lane takes one of those, so each comes kWarps / 2^log_team times.
    const int warp = threadIdx.x / 32, others = (1 << log_team) - 1, other = (warp & ~others) + (threadIdx.x & others);
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) scratch[0][warp] = sum, scratch[1][warp] = squares;
    barrier(1, 32 * kWarps);
    const float share = __fdividef(float(1 << log_team) / kWarps, C);
    float mean = norm.bias ? warp_sum<kWarps>(scratch[0][other]) * share : 0.f;
    float variance = warp_sum<kWarps>(scratch[1][other]) * share - mean * mean;
    if (mean * mean > kFar * variance) look_again(origin(x_rows, at, row), shift, mean, variance);
    const float scale = rsqrtf(fmaxf(variance, 0.f) + norm.eps);
#pragma unroll 2
    for (int c = first; c < end; c += step) {
      float w[kVec<T>], b[kVec<T>];
      unpack<T>(load(to + c), x);
      unpack<T>(load(home + c), w);
      unpack<T>(norm.bias ? load(home + C + c) : zeros(), b);
      for (int i = 0; i < kVec<T>; ++i) x[i] = (x[i] - shift - mean) * scale * w[i] + b[i];
      store(to + c, arranged(pack<T>(x)));
    }
  }

  // The difference of squares loses digits as the square of the first number's deviation, counted in standard deviations.
  static constexpr float kFar = sizeof(T) == sizeof(float) ? 4 : 256;

  // By each warp of a team; all find the same, to the bit. A warp reads the whole row from where it was copied: the others
  // may be writing the copy already. What other blocks have sent lies in L2.
  __device__ void look_again(const T* row, float& shift, float& mean, float& variance) const {
    float sum = 0, squares = 0, x[kVec<T>];
    shift += mean;
#pragma unroll 1
    for (int c = threadIdx.x % 32 * kVec<T>; c < C; c += 32 * kVec<T>) {
      float part = 0, part_squares = 0;  // short sums round less
      unpack<T>(load_from_l2(row + c), x);
      for (float value : x) {
        part += value - shift;
        part_squares += (value - shift) * (value - shift);
      }
      sum += part, squares += part_squares;
    }
    mean = __fdividef(warp_sum(sum), C);
    variance = __fdividef(warp_sum(squares), C) - mean * mean;
  }
};

}  // namespace eet
