// Activations that blocks of one kernel pass on to each other without a barrier: a number tells by itself that it has
// arrived. Where none has yet, all bits are 1, a NaN that no conversion to 16 bits makes; so the first value that is
// not that is the one that was sent, and no order between stores is needed (as NCCL's LL protocol, with the flag in
// the data).
#pragma once

#include <cstdint>

#include "eet/vec.cuh"

namespace eet {

// Two halves of `copies` times `size` numbers of 16 bits, and a count of the kernels that used them. A kernel sends in
// one half and clears the other, which the kernel before it is done with. Each number is sent to several copies, since
// those who look for it all at once would have to queue for one.
struct Exchange {
  uint16_t* numbers;
  unsigned* turns;
  int size, copies;  // numbers of a copy, a multiple of 8

  // After what used it before was waited for.
  __device__ unsigned turns_so_far() const {
    unsigned so_far;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(so_far) : "l"(turns) : "memory");
    return so_far;
  }

  __device__ uint16_t* half(unsigned turn) const { return numbers + (turn & 1) * copies * size; }

  // By `num_threads` of every block: the half of this turn.
  __device__ void clear(unsigned turn, int thread, int num_threads) const {
    for (int i = (blockIdx.x * num_threads + thread) * 8; i < copies * size; i += gridDim.x * num_threads * 8) {
      store(half(turn) + i, make_uint4(~0u, ~0u, ~0u, ~0u));
    }
  }

  // By one thread of one block, when all blocks have read turns_so_far(): the halves change places.
  __device__ void turn(unsigned so_far) const { *turns = so_far + 1; }
};

template <typename T>
__device__ inline void send(T* to, T value) {
  const uint16_t bits = reinterpret_cast<const uint16_t&>(value);
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
}

// Whether no 16 bits of it are all 1.
__device__ inline bool has_arrived(uint4 v) {
  const auto missing = [](uint32_t pair) { return (~pair - 0x00010001u) & pair & 0x80008000u; };
  return !(missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w));
}

}  // namespace eet
