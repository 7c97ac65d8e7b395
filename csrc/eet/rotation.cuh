// What some models do to queries and keys before attention: a norm of each head, then rotary positions. T tokens, D head
// dim.
#pragma once

#include "eet/reduce.cuh"
#include "eet/vec.cuh"

namespace eet {

// The cosine and the sine of an angle, to 1e-7, however many turns it has up to 2^17. cosf and sinf keep a table in local
// memory for angles beyond 1e5. Polynomials: Cephes (Moshier 1989), sinf.c.
__device__ inline float2 turn_of(float angle) {
  const float quarters = rintf(angle * 0.63661977f);
  const float x = fmaf(quarters, 4.3711388e-8f, fmaf(quarters, -1.57079637f, angle)), z = x * x;  // pi / 2 in two parts
  const float sine = fmaf(fmaf(fmaf(-1.9515296e-4f, z, 8.3321609e-3f), z, -1.6666655e-1f) * z, x, x);
  const float cosine = fmaf(fmaf(fmaf(2.4433157e-5f, z, -1.3887316e-3f), z, 4.1666646e-2f) * z, z, fmaf(-0.5f, z, 1.f));
  const int quadrant = int(quarters) & 3;
  const float2 turned = quadrant & 1 ? make_float2(-sine, cosine) : make_float2(cosine, sine);
  return quadrant & 2 ? make_float2(-turned.x, -turned.y) : turned;
}

// What a block keeps in shared memory of one token's rotation.
template <typename T, int kDim>
struct alignas(16) PreparedRotation {
  T q_norm[kDim], k_norm[kDim];
  float2 turns[kDim / 2];
};

template <typename T>
struct Rotation {
  const int64_t* positions;  // [T]
  const T *q_norm, *k_norm;  // [D] or null
  const float* inv_freq;     // [D/2] or null: radians from one position to the next
  float factor, eps;         // of cosines and sines; of the norms

  Rotation() = default;
  Rotation(const int64_t* positions, const void* q_norm, const void* k_norm, const void* inv_freq, float factor, float eps)
      : positions(positions),
        q_norm(static_cast<const T*>(q_norm)),
        k_norm(static_cast<const T*>(k_norm)),
        inv_freq(static_cast<const float*>(inv_freq)),
        factor(factor),
        eps(eps) {}

  __host__ __device__ bool exists() const { return inv_freq || q_norm; }

  // Of the numbers c and c + D/2 of a head: how far a token's are turned.
  __device__ float2 turn(float position, int c) const {
    if (!inv_freq) return make_float2(1.f, 0.f);
    const float2 turned = turn_of(position * inv_freq[c]);
    return make_float2(turned.x * factor, turned.y * factor);
  }

  // By all of a block of kDim threads or more, for one token. Nothing of this step is read, so it needs no wait.
  template <int kDim>
  __device__ void prepare(int64_t token, PreparedRotation<T, kDim>& to) const {
    const int c = threadIdx.x;
    if (c < kDim / 2) to.turns[c] = turn(float(positions[token]), c);
    if (q_norm && c < kDim) to.q_norm[c] = q_norm[c], to.k_norm[c] = k_norm[c];
  }

  // By four neighbouring lanes, each of which has the numbers 8t to 8t + 7 of every 32 of a head.
  template <int kDim>
  __device__ void query(uint4 (&x)[kDim / 32], const PreparedRotation<T, kDim>& by, int t) const {
    apply(x, q_norm ? by.q_norm : nullptr, by.turns, t);
  }
  template <int kDim>
  __device__ void key(uint4 (&x)[kDim / 32], const PreparedRotation<T, kDim>& by, int t) const {
    apply(x, k_norm ? by.k_norm : nullptr, by.turns, t);
  }

 private:
  template <int kSteps>
  __device__ void apply(uint4 (&x)[kSteps], const T* weight, const float2* turns, int t) const {
    constexpr int kDim = 32 * kSteps, kHalf = kSteps / 2;
    float number[kSteps][8], squares = 0.f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      unpack<T>(x[i], number[i]);
#pragma unroll
      for (float n : number[i]) squares += n * n;
    }
    if (weight) {
      const float scale = rsqrtf(warp_sum<4>(squares) / kDim + eps);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        float weights[8];
        unpack<T>(*reinterpret_cast<const uint4*>(weight + i * 32 + t * 8), weights);
#pragma unroll
        for (int k = 0; k < 8; ++k) number[i][k] *= scale * weights[k];
      }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float2 turn = turns[i * 32 + t * 8 + k];
        const float low = number[i][k], high = number[i + kHalf][k];
        number[i][k] = low * turn.x - high * turn.y;
        number[i + kHalf][k] = high * turn.x + low * turn.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) x[i] = pack<T>(number[i]);
  }
};

}  // namespace eet
