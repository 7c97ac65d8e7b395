// What follows cuBLAS in linear layers of many tokens. T tokens, N outputs.
#include "eet/activation.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

// Why      cuBLAS adds a bias or a residual, and of activations knows gelu_tanh; one pass over its result does the rest
// Mapping  a thread a vector, or a number where N is no multiple of a vector
// Traffic  reads T*N (and the residual's T*N), writes T*N
// Needs    nothing; `out` may be y or the residual
// Numerics fp32, rounded once
// Source   the same fusion as EET's add_bias kernels
template <typename T, int kWidth>
__global__ void epilogue_kernel(T* out, const T* y, const T* bias, const T* residual, int64_t num, int N, int act) {
  const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  if (first >= num) return;
  const int n = first % N;
  alignas(16) T value[kWidth], shift[kWidth], base[kWidth];
  const auto get = [](T(&to)[kWidth], const T* from) {
    if constexpr (kWidth == 1) {
      to[0] = from[0];
    } else {
      *reinterpret_cast<uint4*>(to) = eet::load(from);
    }
  };
  get(value, y + first);
  if (bias) get(shift, bias + n);
  if (residual) get(base, residual + first);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float x = eet::to_float(value[i]) + (bias ? eet::to_float(shift[i]) : 0.f);
    x = sizeof(T) == 2 && act == eet::kGelu ? eet::gelu_of(x) : eet::activate(x, act);
    value[i] = eet::from_float<T>(residual ? x + eet::to_float(base[i]) : x);
  }
  if constexpr (kWidth == 1) {
    out[first] = value[0];
  } else {
    eet::store(out + first, *reinterpret_cast<uint4*>(value));
  }
}

}  // namespace

// out = act(y + bias) + residual, for y = x weight^T.
extern "C" cudaError_t eet_epilogue(void* out, const void* y, const void* bias, const void* residual, int dtype, int T,
                                    int N, int act, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    constexpr int kBlock = 256;
    const int64_t num = int64_t(T) * N;
    const auto launch = [&](auto kernel, int width) {
      const int64_t num_blocks = (num + kBlock * width - 1) / (kBlock * width);
      kernel<<<num_blocks, kBlock, 0, stream>>>(static_cast<Type*>(out), static_cast<const Type*>(y),
                                                  static_cast<const Type*>(bias),
                                                  static_cast<const Type*>(residual), num, N, act);
      return cudaGetLastError();
    };
    return N % eet::kVec<Type> ? launch(epilogue_kernel<Type, 1>, 1)
                               : launch(epilogue_kernel<Type, eet::kVec<Type>>, eet::kVec<Type>);
  });
}
