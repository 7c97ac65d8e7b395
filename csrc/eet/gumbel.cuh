// Random numbers without a state: the noise of a draw depends on (a row's key, position, token) alone.
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
  __device__ explicit Gumbel(uint32_t key) : key(key) {}

  __device__ static uint32_t key_of(int64_t noise, int64_t position) { return mix(uint32_t(noise) + uint32_t(position)); }

  __device__ float of(int token) const {
    const float uniform = (float(mix(key + token) & 0x7fffffu) + 0.5f) * 0x1p-23f;
    return -logf(-logf(uniform));
  }

 private:
  uint32_t key;
};

// Times the reciprocal of a temperature, rounded before anything is added.
__device__ inline float scaled(float logit, float scale) { return __fmul_rn(logit, scale); }

// How tokens are drawn, if at all. Rows of one launch may ask for different things.
struct Draw {
  const int64_t* noise;      // [B] keys of the rows' noise, or null: every row's largest logit is chosen
  const float* temperature;  // [B] 0: the row's largest logit is chosen
  const int64_t* positions;  // [.]
  const int64_t* at;         // [B] or null: row i has positions[at[i]]

  __host__ __device__ bool exists() const { return noise; }

  __device__ int64_t place(int row) const { return at ? at[row] : row; }

  // Of a row's noise: the token is drawn whose scaled logit is the largest with it.
  __device__ uint32_t key(int row) const { return exists() ? Gumbel::key_of(noise[row], positions[place(row)]) : 0; }

  __device__ float temperature_of(int row) const { return exists() ? temperature[row] : 0.f; }

  // 1 / temperature, or 0 where nothing is drawn.
  __device__ float scale(int row) const {
    const float its_temperature = temperature_of(row);
    return its_temperature > 0 ? 1.f / its_temperature : 0.f;
  }
};

}  // namespace eet
