// Blocks of a cluster read each other's shared memory (sm_90 and later; elsewhere a cluster is one block).
#pragma once

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

}  // namespace eet
