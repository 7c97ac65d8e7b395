// A ring of stages in shared memory: one warp fills them from global memory in the background, the others empty them.
#pragma once

#include <cstdint>

#include "eet/mbarrier.cuh"
#include "eet/mma.cuh"

namespace eet {

// Lanes of a warp that say that it is done with a stage. One is enough, behind __syncwarp(); but racecheck sees no order
// between that lane and what the others have read, so for it each says so itself.
#ifdef EET_RACECHECK
constexpr int kLeavingLanes = 32;
#else
constexpr int kLeavingLanes = 1;
#endif

// The place of a walk around the ring.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void step(int num_stages) {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  }
};

struct Ring {
  char* stages;        // num_stages times stage_bytes
  uint64_t* barriers;  // [2][num_stages]: filled, emptied
  int num_stages, stage_bytes;

  static constexpr int bytes(int num_stages, int stage_bytes) {
    return num_stages * (stage_bytes + 2 * int(sizeof(uint64_t)));
  }
  // Whether a plan's stages, one at least, lie in `room` bytes.
  static bool fits(int num_stages, int stage_bytes, int room) {
    return num_stages > 0 && stage_bytes > 0 && num_stages <= room / bytes(1, stage_bytes);
  }

  __device__ uint64_t* filled(RingPlace at) const { return barriers + at.stage; }
  __device__ uint64_t* emptied(RingPlace at) const { return barriers + num_stages + at.stage; }

  // For one thread, when num_readers warps will empty the stages; all threads synchronize afterwards.
  __device__ void init(int num_readers) const {
    for (int stage = 0; stage < num_stages; ++stage) {
#if __CUDA_ARCH__ >= 900
      barrier_init(barriers + stage, 1);
#else
      barrier_init(barriers + stage, 32);
#endif
      barrier_init(barriers + num_stages + stage, kLeavingLanes * num_readers);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    before_copies();
  }

  // After a thread wrote into a stage itself: copies that are asked for later come later.
  __device__ static void before_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }

  // By all of one warp: at most 32 rows of row_bytes (a multiple of 16), which begin at `from(row)` and are `stride` bytes
  // apart in the stage. It waits until the stage was emptied, and not for the copies.
  template <typename From>
  __device__ void fill(RingPlace at, From from, int num_rows, int row_bytes, int stride) const {
    const int lane = threadIdx.x % 32;
    char* to = stages + at.stage * stage_bytes;
    begin(at, num_rows * row_bytes);
#if __CUDA_ARCH__ >= 900
    if (lane < num_rows) copy(at, to + lane * stride, from(lane), row_bytes);
#else
    for (int row = 0; row < num_rows; ++row) {
      const char* const its_from = from(row);
      for (int byte = lane * 16; byte < row_bytes; byte += 512) {
        copy_async(to + row * stride + byte, its_from + byte, true);
      }
    }
#endif
    end(at);
  }

  // The same in parts: all of the warp begins, any lanes copy (on sm_90 and later), all end. `bytes`: of all copies.
  // begin() waits until the stage was emptied.
  __device__ void begin(RingPlace at, int bytes) const {
    barrier_wait(emptied(at), at.parity ^ 1);  // the phase before the first counts as passed
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) expect_bytes(filled(at), bytes);
    __syncwarp();
#endif
  }
  // By one lane, a multiple of 16 bytes.
  __device__ void copy(RingPlace at, char* to, const char* from, int bytes) const {
#if __CUDA_ARCH__ >= 900
    uint64_t once;  // they are read once: instructions, activations and arguments stay in L2 instead
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(filled(at))), "l"(once)
        : "memory");
#endif
  }
  __device__ void end(RingPlace at) const {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(filled(at))) : "memory");
#endif
  }

  // The stage's first byte, once it is filled.
  __device__ const char* wait(RingPlace at) const {
    barrier_wait(filled(at), at.parity);
    return stages + at.stage * stage_bytes;
  }

  // By all of a warp that is done with the stage: what it read has arrived in registers, and was used.
  __device__ void release(RingPlace at) const {
    __syncwarp();
    if (threadIdx.x % 32 < kLeavingLanes) barrier_arrive(emptied(at));
  }
};

}  // namespace eet
