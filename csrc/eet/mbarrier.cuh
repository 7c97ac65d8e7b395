// Barriers in shared memory that count arrivals and, on sm_90 and later, the bytes of copies. The parity of a phase says
// whether it has passed: two neighbouring phases can be told apart, and no others.
#pragma once

#include <cstdint>

#include "eet/mma.cuh"

namespace eet {

__device__ inline void barrier_init(uint64_t* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(shared_address(barrier))
               : "memory");
}

// One arrival, and a promise of bytes: the phase ends when they are there (sm_90 and later).
__device__ inline void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return passed;
}

__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

}  // namespace eet
