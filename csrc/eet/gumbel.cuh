// Random numbers without a state: the noise of a draw depends on (seed, row, position, word) alone.
#pragma once

#include <cstdint>

namespace eet {

// A 31-bit integer hash (two rounds of the multiply-xorshift family; constants by C. Wellons, "hash-prospector").
__device__ inline uint32_t mix(uint32_t x) {
  x &= 0x7fffffffu;
  x = ((x ^ x >> 15) * 0x2c1b3c6du) & 0x7fffffffu;
  x = ((x ^ x >> 15) * 0x297a2d39u) & 0x7fffffffu;
  return x ^ x >> 15;
}

// Gumbel noise: the arg-max of logits with it is a draw by their chances. Its logarithms are precise, so that PyTorch
// draws the same to the bit.
class Gumbel {
 public:
  __device__ Gumbel(int64_t seed, int row, int64_t position) {
    key = mix(mix(mix(mix(uint32_t(seed)) + uint32_t(seed >> 31)) + row) + uint32_t(position));
  }

  __device__ float of(int word) const {
    const float uniform = (float(mix(key + word) & 0x7fffffu) + 0.5f) * 0x1p-23f;
    return -logf(-logf(uniform));
  }

 private:
  uint32_t key;
};

}  // namespace eet
