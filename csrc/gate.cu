// Gated activations. T tokens, F channels of what comes out, twice as many of what goes in.
#include "eet/activation.cuh"
#include "eet/dependent.cuh"
#include "eet/launch.cuh"
#include "eet/vec.cuh"

namespace {

// The fast exponential loses what 16 bits do not show.
template <typename T>
__device__ inline float silu(float x) {
  return sizeof(T) == 4 ? x / (1.f + expf(-x)) : __fdividef(x, 1.f + eet::exp_of(-x));
}

// Why      in PyTorch two launches, and the activated half goes through memory once more
// Mapping  a thread a vector: grid T x F / (256 vectors)
// Traffic  2*F numbers read and F written a token
// Needs    F a multiple of a vector
// Numerics fp32, rounded once
// Source   Shazeer 2020, GLU Variants Improve Transformer
template <typename T>
__global__ void __launch_bounds__(256) gate_kernel(T* out, const T* x, int gate, int F) {
  constexpr int kVec = eet::kVec<T>;
  const int64_t token = blockIdx.x;
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  eet::wait_for_previous();
  eet::let_next_begin();
  if (c >= F) return;
  float gates[kVec], values[kVec];
  eet::unpack<T>(eet::load(x + token * 2 * F + c), gates);
  eet::unpack<T>(eet::load(x + token * 2 * F + F + c), values);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float g = gates[i];
    values[i] *= gate == eet::kSilu ? silu<T>(g) : eet::activate(g, gate);
  }
  eet::store(out + token * F + c, eet::pack<T>(values));
}

}  // namespace

// out [T,F] = act(x[:, :F]) * x[:, F:], x [T,2F]; `act`: kSilu or kGeluTanh.
extern "C" cudaError_t eet_gate(void* out, const void* x, int act, int dtype, int T, int F, int dependent,
                                cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    if (F % eet::kVec<Type>) return cudaErrorInvalidValue;
    const int vectors = F / eet::kVec<Type>, threads = min(eet::ceil_div(vectors, 32) * 32, 256);
    const dim3 grid(T, eet::ceil_div(vectors, threads));
    return eet::launch(gate_kernel<Type>, {grid, threads, 0, stream, 1, dependent != 0}, static_cast<Type*>(out),
                       static_cast<const Type*>(x), act, F);
  });
}
