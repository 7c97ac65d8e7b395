// What launchers share: types by number, limits of the device, names of errors, and how a kernel is launched.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// Python shows this text when a launcher returns an error.
extern "C" __attribute__((weak, used)) const char* eet_error_string(int error) {
  return cudaGetErrorString(cudaError_t(error));
}

namespace eet {

enum DType { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

// Calls launch(T()) for one of the two 16-bit types.
template <typename Launch>
cudaError_t by_half_type(int dtype, Launch launch) {
  switch (dtype) {
    case kFloat16: return launch(__half());
    case kBFloat16: return launch(__nv_bfloat16());
    default: return cudaErrorInvalidValue;
  }
}

template <typename Launch>
cudaError_t by_type(int dtype, Launch launch) {
  return dtype == kFloat32 ? launch(float()) : by_half_type(dtype, launch);
}

// Shared memory beyond 48 KiB a block has to be asked for. Static arrays count too, but the 48 KiB limit holds for them
// alone: no kernel that takes more at launch has 24 KiB of them.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
  if (bytes <= 24 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Bytes of shared memory that a block can have.
inline int whole_shared() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 1024; }

// How a kernel is launched. `cluster`: blocks along x that write into each other's shared memory (sm_90 and later).
// `dependent`: it may begin while the kernel before it in the stream still runs (sm_90 and later); every thread block
// then calls wait_for_previous() before it touches what another kernel wrote or reads, and before it ends.
struct Launch {
  dim3 grid;
  int threads, shared_bytes;
  cudaStream_t stream;
  int cluster = 1;
  bool dependent = false;
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
  if (cudaError_t error = allow_shared(kernel, how.shared_bytes)) return error;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = dim3(how.threads);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  config.attrs = attributes;
  if (how.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = how.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (how.dependent) {
    // Two kernels that divide a multiprocessor's memory into L1 and shared in different ways cannot be there together.
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error) return error;
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace eet
