// Activations with their slopes, in fp32. 16 bits do not show what the fast functions lose; fp32 takes the precise ones.
#pragma once

#include "eet/activation.cuh"

namespace eet {

struct Activated {
  float value, slope;
};

template <bool kPrecise>
__device__ inline float tanh_for(float x) {
  return kPrecise ? tanhf(x) : tanh_of(x);
}

// The normal distribution at x, and its integral up to x.
template <bool kPrecise>
__device__ inline float2 normal(float x) {
  const float density = 0.3989422804014327f * (kPrecise ? expf(-0.5f * x * x) : exp_of(-0.5f * x * x));
  if (kPrecise) return {density, 0.5f * erfcf(-0.7071067811865476f * x)};
  const float t = fminf(fabsf(x), 8.f), tail = normal_tail(t);
  return {density, x < 0 ? tail : 1.f - tail};
}

template <bool kPrecise>
__device__ inline Activated activated(float x, int act) {
  switch (act) {
    case kGeluTanh: {
      const float scale = 0.7978845608028654f, cubic = 0.044715f, square = x * x;
      const float t = tanh_for<kPrecise>(scale * (x + cubic * square * x));
      return {0.5f * x * (1.f + t), 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * scale * (1.f + 3.f * cubic * square)};
    }
    case kGelu: {
      const float2 at = normal<kPrecise>(x);
      return {x * at.y, at.y + x * at.x};
    }
    case kRelu: return {x < 0 ? 0.f : x, x > 0 ? 1.f : 0.f};  // NaN stays NaN
    case kTanh: {
      const float t = tanh_for<kPrecise>(x);
      return {t, 1.f - t * t};
    }
    case kSilu: {
      const float share = kPrecise ? 1.f / (1.f + expf(-x)) : __fdividef(1.f, 1.f + exp_of(-x));
      return {x * share, share * (1.f + x * (1.f - share))};
    }
    default: return {x, 1.f};
  }
}

// visit(i, activated(x[i])) for several at once.
template <bool kPrecise, int n, typename Visit>
__device__ inline void each_activated(const float (&x)[n], int act, Visit visit) {
  by_activation(act, [&](auto known) {
#pragma unroll
    for (int i = 0; i < n; ++i) visit(i, activated<kPrecise>(x[i], decltype(known)::value));
  });
}

}  // namespace eet
