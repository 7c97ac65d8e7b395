// A norm of activations that stay in registers: those of the warps that multiply them. K inputs.
#pragma once

#include "eet/mma.cuh"
#include "eet/norm.cuh"
#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kRegisterTokens = 8;  // at most: the columns of an mma

// Every warp has a part of each row: lane 4g+t has pieces of token g, each of 8 numbers. Mean and variance take one
// pass, and a second one around the mean where that lies far from 0, so that it costs no digits.
template <typename T, int kWarps>
class RegisterNorm {
 public:
  const float share;  // of a number in a mean

  // `home`: bytes(K) of shared memory.
  __device__ RegisterNorm(Norm<T> norm, int K, char* home)
      : share(1.f / K),
        norm(norm),
        moments(reinterpret_cast<float2*>(home)),
        home(reinterpret_cast<T*>(home + kMomentsBytes)),
        K(K) {}

  // Behind them, what is filled in lines of 128 bytes can begin.
  __host__ __device__ static int bytes(int K) { return kMomentsBytes + (2 * K * int(sizeof(T)) + 127) / 128 * 128; }

  // What does not depend on x, to be on its way while x is waited for.
  __device__ void request() const {
    for (int c = threadIdx.x * 8; c < K; c += 8 * kReaders) {
      copy_async(home + c, norm.weight + c, true);
      if (norm.bias) copy_async(home + K + c, norm.bias + c, true);
    }
    commit_copies();
  }

  // Piece i holds the numbers from `first` + i * `apart` on, and nothing where that is K or more. It leaves them in the
  // order of an mma's fragments: the second and third of every four words change places.
  template <int kCount>
  __device__ void apply(uint4 (&x)[kCount], const T* row, int first, int apart) const {
    float shift = 0;
    const int count = first + (kCount - 1) * apart < K ? kCount : kCount - 1;
    wait_for_copies<0>();
    sum_moments(x, moments);
    float2 found = moments_of_row(moments);
    // Every warp has all tokens, so all warps agree.
    if (__any_sync(0xffffffffu, found.x * found.x > kFar * found.y)) {
      shift = found.x;
      float sum = 0, squares = 0;
#pragma unroll 1
      for (int c = first; c < K; c += apart) accumulate(load(row + c), shift, sum, squares);
      sum = warp_sum<4>(sum), squares = warp_sum<4>(squares);
      float2* const scratch = moments + kRegisterTokens * kWarps;
      if (threadIdx.x % 4 == 0) store_moments(sum, squares, scratch);
      found = moments_of_row(scratch);
    }
    const uint32_t zero = opaque_zero();
    const float scale = rsqrtf(fmaxf(found.y, 0.f) + norm.eps), offset = -found.x * scale;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i == kCount - 1 && i == count) break;
      // A piece waits for the one before the last: else all are unpacked at once, into registers that are not there.
      if (i >= 2) {
        const uint32_t none = x[i - 2].w & zero;
        x[i].x ^= none, x[i].y ^= none, x[i].z ^= none, x[i].w ^= none;
      }
      float v[8], w[8], b[8];
      unpack<T>(x[i], v);
      unpack<T>(load(home + first + i * apart), w);
      unpack<T>(norm.bias ? load(home + K + first + i * apart) : zeros(), b);
#pragma unroll
      for (int k = 0; k < 8; ++k) v[k] = ((v[k] - shift) * scale + offset) * w[k] + b[k];
      const uint4 whole = pack<T>(v);
      x[i] = make_uint4(whole.x, whole.z, whole.y, whole.w);
    }
  }

 private:
  static constexpr int kReaders = 32 * kWarps, kMomentsBytes = 2 * kRegisterTokens * kWarps * int(sizeof(float2));
  static constexpr float kFar = 16;  // of the mean's square, in variances: there their difference has too few digits
  Norm<T> norm;
  float2* moments;  // [2][token][warp]
  T* home;          // [2K]: where norm weights and biases wait
  int K;

  // Leaves the sums of this warp's numbers and of their squares, by tensor cores: a row times ones, and the diagonal of
  // the rows times themselves. Behind the last number there are zeros.
  template <int kCount>
  __device__ void sum_moments(const uint4 (&x)[kCount], float2* scratch) const {
    const uint32_t ones = pack2<T>(1.f, 1.f);
    const int g = threadIdx.x % 32 / 4;
    float sum[4] = {}, low[2][4] = {}, high[2][4] = {};
#pragma unroll
    for (const uint4& v : x) {
      mma<T>(sum, v.x, v.y, v.z, v.w, ones, ones);
      mma_short<T>(low[0], v.x, v.y, v.x);
      mma_short<T>(high[0], v.x, v.y, v.y);
      mma_short<T>(low[1], v.z, v.w, v.z);
      mma_short<T>(high[1], v.z, v.w, v.w);
    }
    const float even = (low[0][0] + low[1][0]) + (high[0][2] + high[1][2]);
    const float odd = (low[0][1] + low[1][1]) + (high[0][3] + high[1][3]);
    if (threadIdx.x % 4 == g / 2) store_moments(sum[0] + sum[2], g % 2 ? odd : even, scratch);
  }

  __device__ static void store_moments(float sum, float squares, float2* scratch) {
    scratch[threadIdx.x % 32 / 4 * kWarps + threadIdx.x / 32] = make_float2(sum, squares);
  }

  __device__ static void accumulate(uint4 piece, float shift, float& sum, float& squares) {
    float v[8];
    unpack<T>(piece, v);
#pragma unroll
    for (float value : v) sum += value - shift, squares += (value - shift) * (value - shift);
  }

  // Mean and variance, from what all warps have stored of the lane's row.
  __device__ float2 moments_of_row(const float2* scratch) const {
    float sum = 0, squares = 0;
    const int g = threadIdx.x % 32 / 4;
    barrier(1, kReaders);
#pragma unroll
    for (int warp = 0; warp < kWarps; warp += 2) {
      const float4 two = *reinterpret_cast<const float4*>(scratch + g * kWarps + warp);
      sum += two.x + two.z, squares += two.y + two.w;
    }
    const float mean = norm.bias ? sum * share : 0.f;
    return make_float2(mean, squares * share - mean * mean);
  }
};

}  // namespace eet
