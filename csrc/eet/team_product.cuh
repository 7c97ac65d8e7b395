// A stage's product by a team of warps, in 16 bits: 8 outputs, up to 8 tokens.
#pragma once

#include "eet/mma.cuh"
#include "eet/vec.cuh"

namespace eet {

constexpr int kTeamRows = 8;  // outputs of a stage, at most
constexpr int kChunk = 32;    // inputs in one step of a warp

// A warp's part of out^T[8 outputs, up to 8 tokens], by a team of kWarps: of a stage's chunks every kWarps-th.
// Lane 4g+t reads 16 bytes of output g, and those are the fragment A of an mma as they come: its rows g and g + 8 are
// both output g, the first with the words x and z of the four, the second with y and w. So of the product with the
// activations' (x, z) the upper half is output g, and of that with (y, w) the lower; the other halves are of no use.
// The activations' words wait in the order x, z, y, w.
template <typename T, int kWarps>
struct TeamProduct {
  static constexpr int kStep = kWarps * kChunk, kChains = 2;  // sums that do not wait for each other
  float upper[kChains][4] = {}, lower[kChains][4] = {};

  // `row`: the lane's output in the stage; `x`: the lane's token from the stage's first input on; `last`: the stage's
  // last vector. Past it the last is read again: there the activations are 0.
  __device__ void add(uint32_t row, uint32_t x, int last) {
    const int first = threadIdx.x / 32 % kWarps * kChunk, lane = threadIdx.x % 4 * kVec<T>;
    x += (first + lane) * int(sizeof(T));
#pragma unroll 2
    for (int k = first; k <= last; k += kChains * kStep) {
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain, x += kStep * int(sizeof(T))) {
        if (chain && k + kStep > last) break;
        const uint4 w = load_shared(row + min(k + chain * kStep + lane, last) * int(sizeof(T)));
        const uint4 v = load_shared(x);
        mma<T>(upper[chain], w.x, w.y, w.z, w.w, v.x, v.y);
        mma<T>(lower[chain], w.x, w.y, w.z, w.w, v.z, v.w);
      }
    }
  }

  __device__ void store(float* partial, int num_tokens) {  // [kTeamRows][tokens][kWarps]
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * t + i;
      const float sum = (upper[0][i] + lower[0][2 + i]) + (upper[1][i] + lower[1][2 + i]);
      if (token < num_tokens) partial[(g * num_tokens + token) * kWarps] = sum;
    }
  }
};

}  // namespace eet
