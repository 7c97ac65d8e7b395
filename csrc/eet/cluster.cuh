// Blocks of a cluster read each other's shared memory (sm_90 and later; elsewhere a cluster is one block).
#pragma once

#include <cuda_runtime.h>

namespace eet {

__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The number that the cluster's block `rank` keeps where this block keeps `*mine`.
__device__ inline float of_block(const float* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  float value;
  const unsigned address = unsigned(__cvta_generic_to_shared(mine));
  asm volatile(
      "{\n\t.reg .u32 other;\n\tmapa.shared::cluster.u32 other, %1, %2;\n\tld.shared::cluster.f32 %0, [other];\n\t}"
      : "=f"(value)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
#else
  return *mine;
#endif
}

// Launches `kernel` with clusters of `size` blocks along x.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, int size,
                            cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = size > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace eet
