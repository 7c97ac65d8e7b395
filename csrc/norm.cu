// Layer norm and RMS norm of many rows: the first launch of the wide path of norm_linear. T tokens, C channels.
#include "eet/launch.cuh"
#include "eet/norm.cuh"

namespace {

constexpr int kWarps = 8;

// Why      a prefill's rows are too many to be normalized inside the matrix product that reads them
// Mapping  a block of 8 warps a row: grid T, 256 threads; the row waits in shared memory between the passes
// Traffic  reads C and writes C numbers a row; weight and bias stay in L2
// Needs    C a multiple of 8, C * itemsize bytes of shared memory
// Numerics two-pass mean and variance in fp32; the result is rounded once
// Source   Ba et al. 2016, Layer Normalization; Zhang and Sennrich 2019, Root Mean Square Layer Normalization
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) norm_kernel(T* out, const T* x, eet::Norm<T> norm, int C) {
  extern __shared__ uint4 shared[];
  T* row = reinterpret_cast<T*>(shared);
  const int64_t offset = int64_t(blockIdx.x) * C;
  eet::stage_rows<kWarps>(row, C, x + offset, 1, C, norm);
  for (int c = threadIdx.x * eet::kVec<T>; c < C; c += blockDim.x * eet::kVec<T>) {
    eet::store(out + offset + c, eet::load(row + c));  // a thread reads only what it wrote
  }
}

}  // namespace

extern "C" cudaError_t eet_norm(void* out, const void* x, const void* weight, const void* bias, int dtype, int T, int C,
                                float eps, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const int bytes = C * sizeof(Type);
    if (cudaError_t error = eet::allow_shared(norm_kernel<Type>, bytes)) return error;
    const eet::Norm<Type> norm{static_cast<const Type*>(weight), static_cast<const Type*>(bias), eps};
    norm_kernel<<<T, kWarps * 32, bytes, stream>>>(static_cast<Type*>(out), static_cast<const Type*>(x), norm, C);
    return cudaGetLastError();
  });
}
