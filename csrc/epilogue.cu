// What follows cuBLAS in linear layers of many tokens. T tokens, N outputs.
#include "eet/activation.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

constexpr int kBlock = 128;

// Why      cuBLAS adds a bias or a residual, and of activations knows gelu_tanh; one pass over its result does the rest
// Mapping  a block a token; a thread takes a vector at a time, or a number where N is no multiple of a vector
// Traffic  reads T*N (and the residual's T*N), writes T*N
// Needs    nothing; `out` may be y or the residual
// Numerics fp32, rounded once
// Source   the same fusion as EET's add_bias kernels
template <typename T, int kWidth>
__global__ void __launch_bounds__(kBlock)
    epilogue_kernel(T* out, const T* y, const T* bias, const T* residual, int N, int act) {
  const int64_t token = int64_t(blockIdx.x) * N;
  for (int n = threadIdx.x * kWidth; n < N; n += kBlock * kWidth) {
    float x[kWidth] = {};
    const auto add = [&](const T* from) {
      alignas(16) T part[kWidth];
      if constexpr (kWidth == 1) {
        part[0] = from[0];
      } else {
        *reinterpret_cast<uint4*>(part) = eet::load(from);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] += eet::to_float(part[i]);
    };
    add(y + token + n);
    if (bias) add(bias + n);
    if (sizeof(T) == 2 && act == eet::kGelu) {
#pragma unroll
      for (float& number : x) number = eet::gelu_of(number);
    } else {
      eet::activate_all(x, act);
    }
    if (residual) add(residual + token + n);
    if constexpr (kWidth == 1) {
      out[token + n] = eet::from_float<T>(x[0]);
    } else {
      eet::store(out + token + n, eet::pack<T>(x));
    }
  }
}

}  // namespace

// out = act(y + bias) + residual, for y = x weight^T.
extern "C" cudaError_t eet_epilogue(void* out, const void* y, const void* bias, const void* residual, int dtype, int T,
                                    int N, int act, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const auto kernel = N % eet::kVec<Type> ? epilogue_kernel<Type, 1> : epilogue_kernel<Type, eet::kVec<Type>>;
    const auto in = [](const void* p) { return static_cast<const Type*>(p); };
    return eet::launch(kernel, {T, kBlock, 0, stream}, static_cast<Type*>(out), in(y), in(bias), in(residual), N, act);
  });
}
