// Int8 weights made numbers of the activations' type, whole. N outputs, K inputs, G groups of inputs with a scale each.
#include "eet/int8.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

// Why      for many tokens the product is the library's, which wants weights of the activations' type
// Mapping  a thread 8 weights of one output
// Traffic  reads N*K bytes, writes N*K numbers
// Needs    K a multiple of 8; groups of a power of two, at least 8 inputs
// Numerics the product in fp32, rounded once
// Source   none
template <typename T>
__global__ void dequantize_kernel(T* out, const int8_t* weight, const float* scale, int64_t num, int K, int G,
                                  int log_inputs) {
  const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (first >= num) return;
  const int64_t n = first / K;
  const float factor = scale[n * G + (G > 1 ? int(first - n * K) >> log_inputs : 0)];
  const uint2 eight = *reinterpret_cast<const uint2*>(weight + first);
  float x[8];
  eet::widen(eight.x, reinterpret_cast<float(&)[4]>(x[0]));
  eet::widen(eight.y, reinterpret_cast<float(&)[4]>(x[4]));
  for (float& each : x) each *= factor;
#pragma unroll
  for (int i = 0; i < 8; i += eet::kVec<T>) {
    eet::store(out + first + i, eet::pack<T>(reinterpret_cast<const float(&)[eet::kVec<T>]>(x[i])));
  }
}

}  // namespace

// out = scale weight.
extern "C" cudaError_t eet_dequantize(void* out, const void* weight, const void* scale, int dtype, int N, int K, int G,
                                      int log_inputs, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    constexpr int kBlock = 256;
    const int64_t num = int64_t(N) * K, num_blocks = (num + kBlock * 8 - 1) / (kBlock * 8);
    return eet::launch(dequantize_kernel<Type>, {dim3(num_blocks), kBlock, 0, stream}, static_cast<Type*>(out),
                       static_cast<const int8_t*>(weight), static_cast<const float*>(scale), num, K, G, log_inputs);
  });
}
