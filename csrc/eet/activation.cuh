// Activations by number, in fp32.
#pragma once

#include "eet/reduce.cuh"

namespace eet {

enum Activation { kNone = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSilu = 4, kTanh = 5 };

// To 1e-6; libdevice's tanhf takes three times the instructions.
__device__ inline float tanh_of(float x) { return 1.f - __fdividef(2.f, 1.f + exp_of(2.f * x)); }

// GELU by erf, to 3e-7: erff takes three times the instructions. Abramowitz and Stegun 1964, 7.1.26.
__device__ inline float gelu_of(float x) {
  const float z = fabsf(x) * 0.7071067811865476f, t = __fdividef(1.f, fmaf(0.3275911f, z, 1.f));
  const float poly = fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t,
                          0.254829592f);
  const float beyond = poly * t * exp_of(-z * z);  // 1 - erf(z)
  return 0.5f * x * (x < 0 ? beyond : 2.f - beyond);
}

__device__ inline float activate(float x, int act) {
  switch (act) {
    case kGeluTanh: return 0.5f * x * (1.f + tanh_of(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case kGelu: return 0.5f * x * (1.f + erff(0.7071067811865476f * x));
    case kRelu: return fmaxf(x, 0.f);
    case kTanh: return tanh_of(x);
    case kSilu: return __fdividef(x, 1.f + exp_of(-x));
    default: return x;
  }
}

// Of several at once: the activation is looked up for all of them.
template <int n>
__device__ inline void activate_all(float (&x)[n], int act) {
  const auto each = [&](int known) {
#pragma unroll
    for (float& one : x) one = activate(one, known);
  };
  switch (act) {
    case kGeluTanh: return each(kGeluTanh);
    case kGelu: return each(kGelu);
    case kRelu: return each(kRelu);
    case kTanh: return each(kTanh);
    case kSilu: return each(kSilu);
  }
}

}  // namespace eet
