// Layer norm and RMS norm of many rows: the first launch of the wide path of norm_linear. T tokens, C channels.
#include "eet/launch.cuh"
#include "eet/norm.cuh"

namespace {

constexpr int kLogWarps = 3;
constexpr int kThreads = 32 << kLogWarps;

// Why      a prefill's rows are too many to be normalized inside the matrix product that reads them
// Mapping  a block of 8 warps a row: grid T, 256 threads; between the passes the row waits in `out`
// Traffic  reads C and writes C numbers a row; weight and bias stay in L2
// Needs    C a multiple of 8
// Numerics two-pass mean and variance in fp32; the result is rounded once
// Source   Ba et al. 2016, Layer Normalization; Zhang and Sennrich 2019, Root Mean Square Layer Normalization
template <typename T>
__global__ void __launch_bounds__(kThreads) norm_kernel(T* out, const T* x, eet::Norm<T> norm, int C) {
  const int64_t offset = int64_t(blockIdx.x) * C;
  eet::RowStager<kLogWarps, T> stager(1, kLogWarps, C, C, norm);
  stager.request_norm();
  stager.stage(out + offset, x + offset);
}

}  // namespace

extern "C" cudaError_t eet_norm(void* out, const void* x, const void* weight, const void* bias, int dtype, int T, int C,
                                float eps, cudaStream_t stream) {
  return eet::by_type(dtype, [&](auto type) {
    using Type = decltype(type);
    const eet::Norm<Type> norm{static_cast<const Type*>(weight), static_cast<const Type*>(bias), eps};
    norm_kernel<<<T, kThreads, 0, stream>>>(static_cast<Type*>(out), static_cast<const Type*>(x), norm, C);
    return cudaGetLastError();
  });
}
