// Activations by number, in fp32.
#pragma once

#include "eet/reduce.cuh"

namespace eet {

enum Activation { kNone = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSilu = 4, kTanh = 5 };

// To 1e-6; libdevice's tanhf takes three times the instructions.
__device__ inline float tanh_of(float x) { return 1.f - __fdividef(2.f, 1.f + exp_of(2.f * x)); }

__device__ inline float activate(float x, int act) {
  switch (act) {
    case kGeluTanh: return 0.5f * x * (1.f + tanh_of(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case kGelu: return 0.5f * x * (1.f + erff(0.7071067811865476f * x));
    case kRelu: return fmaxf(x, 0.f);
    case kTanh: return tanhf(x);
    case kSilu: return x / (1.f + expf(-x));
    default: return x;
  }
}

}  // namespace eet
