// Dropout without a mask: what is dropped of a call depends on (a token's key, call, channel) alone, so the backward pass
// draws it again. The numbers are those of eet_lab/ops/noise.py, to the bit.
#pragma once

#include "eet/gumbel.cuh"

namespace eet {

struct Drop {
  const int64_t* tokens;  // [T] keys, or null: nothing is dropped
  int call;               // of the pass
  uint32_t below;         // of 2^31: hashes below are dropped
  float scale;            // of what is kept

  __device__ uint32_t row(int64_t token) const { return tokens ? mix(uint32_t(tokens[token]) + uint32_t(call)) : 0; }

  // x are the numbers of a row from channel c on.
  template <int n>
  __device__ void apply(float (&x)[n], uint32_t row, int c) const {
    if (!tokens) return;
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = mix(row + uint32_t(c + i)) >= below ? x[i] * scale : 0.f;
  }
};

}  // namespace eet
