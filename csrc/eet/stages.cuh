// A walk around stages of shared memory that the copy engine fills and warps empty (sm_90 and later).
#pragma once

#include <cstdint>

#include "eet/mma.cuh"

namespace eet {

// A barrier's phase ends with so many arrivals, once all promised bytes are there. The parity of a phase tells it from
// the one before; the phase before the first counts as ended.
__device__ inline void stage_init(uint64_t* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

__device__ inline void stage_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// An arrival and a promise of bytes.
__device__ inline void stage_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void stage_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t ended = 0;
  while (!ended) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

struct StagePlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void step(int num_stages) {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace eet
