// Blocks of a cluster send numbers into each other's shared memory (sm_90 and later; elsewhere a cluster is one block).
//
// A mailbox is shared memory that others write into, and an mbarrier that counts the bytes. One thread opens it; every
// thread says so to the cluster (cluster_arrive); who sends waits until all are open (cluster_wait), and may leave then;
// who receives waits for its bytes. Nothing else synchronizes the blocks.
#pragma once

#include <cstdint>

#include "eet/mbarrier.cuh"

namespace eet {

// For racecheck. It takes one warp's wait for the cluster for all of its block's, so all warps wait before they do anything
// else, where they can: one that waits for another warp first would never come there. And it takes an instruction of a
// whole warp for one of each lane, so a lane that opens a mailbox says that it is alone, in a branch of its own.
#ifdef EET_RACECHECK
constexpr bool kWaitsTogether = true;
__device__ inline void alone() { __syncwarp(1u << threadIdx.x % 32); }
#else
constexpr bool kWaitsTogether = false;
__device__ inline void alone() {}
#endif

#if __CUDA_ARCH__ >= 900

// Both by whole warps: behind a loop of waits, which lanes leave one by one, they meet first (__syncwarp()).
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// For one thread, before it calls cluster_arrive(): `num_bytes` will come.
__device__ inline void open_mailbox(uint64_t* counter, int num_bytes) {
  barrier_init(counter, 1);
  alone();
  expect_bytes(counter, num_bytes);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Where block `rank` of the cluster keeps what this block keeps at `mine`.
__device__ inline uint32_t at_block(const void* mine, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  return address;
}

// `to` and `counter` are addresses at the same block; the counter sees the bytes once they lie there.
__device__ inline void send(uint32_t to, float4 v, uint32_t counter) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(counter)
               : "memory");
}

__device__ inline void send(uint32_t to, float2 v, uint32_t counter) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(v.x), "f"(v.y), "r"(counter)
               : "memory");
}

__device__ inline void send(uint32_t to, float x, uint32_t counter) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x), "r"(counter)
               : "memory");
}

// Until all bytes that the mailbox was opened for are there: barrier_wait(counter, 0), in fewer instructions.
__device__ inline void wait_for_mail(const uint64_t* counter) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t"
      "@!done bra again;\n\t}" ::"r"(shared_address(counter))
      : "memory");
}

// For what has to be told many times: after cluster_arrive() and cluster_wait() all blocks have begun, and a number can
// be put into another's memory, who reads it after the next cluster_barrier().
__device__ inline void put(float* mine, int rank, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at_block(mine, rank)), "f"(x) : "memory");
}

__device__ inline void put(uint64_t* mine, int rank, uint64_t x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(at_block(mine, rank)), "l"(x) : "memory");
}

__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

#else

__device__ inline void put(float* mine, int, float x) { *mine = x; }
__device__ inline void put(uint64_t* mine, int, uint64_t x) { *mine = x; }
__device__ inline void cluster_barrier() { __syncthreads(); }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() {}
__device__ inline void open_mailbox(uint64_t*, int) {}
__device__ inline uint32_t at_block(const void*, int) { return 0; }
__device__ inline void send(uint32_t, float4, uint32_t) {}
__device__ inline void send(uint32_t, float2, uint32_t) {}
__device__ inline void send(uint32_t, float, uint32_t) {}
__device__ inline void wait_for_mail(const uint64_t*) {}

#endif

}  // namespace eet
