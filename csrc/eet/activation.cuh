// Activations by number, in fp32.
#pragma once

#include "eet/constant.cuh"
#include "eet/reduce.cuh"

namespace eet {

enum Activation { kNone = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSilu = 4, kTanh = 5, kLastActivation = kTanh };

// To 1e-6; libdevice's tanhf takes three times the instructions.
__device__ inline float tanh_of(float x) { return 1.f - __fdividef(2.f, 1.f + exp_of(2.f * x)); }

// The normal distribution beyond t from 0 to 8, in a dozen instructions of which one is a special function. Its log2 is
// close to a polynomial: the minimax one of degree 6, fitted up to 5.5.
__device__ inline float normal_tail(float t) {
  const float low = fmaf(fmaf(fmaf(3.236888e-5f, t, -7.5418345e-4f), t, 8.0013908e-3f), t, -0.05324142f);
  return exp2_of(fmaf(fmaf(fmaf(low, t, -0.45893437f), t, -1.1511378f), t, -1.f));
}

// ReLU: x or 0, which fmaxf would also make of NaN.
__device__ inline float positive_of(float x) {
  float positive;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return positive;
}

// GELU by erf, to 3e-7; beyond 8 it is 0 or x. NaN stays NaN.
__device__ inline float gelu_of(float x) {
  const float t = fminf(fabsf(x), 8.f), tail = normal_tail(t);
  return fmaf(-t, tail, positive_of(x));
}

template <int kAct>
__device__ inline float activate(float x) {
  if constexpr (kAct == kGeluTanh) {
    // 0.5 x (1 + tanh(u)) is x / (1 + exp(-2 u)), which keeps digits where tanh(u) is near -1.
    return __fdividef(x, 1.f + exp_of(x * fmaf(x * x, -0.07135481283f, -1.595769122f)));
  } else if constexpr (kAct == kGelu) {
    return 0.5f * x * (1.f + erff(0.7071067811865476f * x));
  } else if constexpr (kAct == kRelu) {
    return positive_of(x);
  } else if constexpr (kAct == kSilu) {
    return __fdividef(x, 1.f + exp_of(-x));
  } else if constexpr (kAct == kTanh) {
    return tanh_of(x);
  } else {
    return x;
  }
}

// Calls all(known) with the activation as a constant: it is looked up for several numbers at once.
template <typename All>
__device__ inline void by_activation(int act, All all) {
  with_constant<kNone, kLastActivation>(act, all);
}

__device__ inline float activate(float x, int act) {
  by_activation(act, [&](auto known) { x = activate<decltype(known)::value>(x); });
  return x;
}

template <int n>
__device__ inline void activate_all(float (&x)[n], int act) {
  by_activation(act, [&](auto known) {
#pragma unroll
    for (float& one : x) one = activate<decltype(known)::value>(one);
  });
}

}  // namespace eet
