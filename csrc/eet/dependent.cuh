// Dependent launch (sm_90 and later): a kernel may begin while the one before it still runs.
//
// A kernel that is launched so may at once read what no kernel of its step has written: weights, a slot's column and
// position, `num_pad`, block tables, keys and values of earlier steps. It calls wait_for_previous() in every block before
// it reads or writes anything else. Kernels launched without the attribute pass both calls at once.
//
// The wait is for one kernel, the one just before. That is enough: each kernel ends after its own wait, or was launched
// without the attribute and began when all before it had ended, so where one has ended, all before it have. For the
// same reason nobody writes after its wait what a kernel before it still reads.
//
// What is read ahead of the wait was written by attention (columns of the cache) and `advance` (a slot's column and
// position) of an earlier step. Between those and the reader stands a kernel that lets the next begin only after its own
// wait, or is launched without the attribute: whichever embeds the new tokens. What begins after it finds earlier steps
// complete. So a kernel may let the next begin before its wait only if it is not a step's first, as the linear ones and
// decode attention do.
//
// `num_pad`, block tables and what is known of new requests are written by copies, or by PyTorch's kernels, between
// steps. Neither is a dependent launch: it begins when all before it have ended, and what comes after it begins when it
// has ended. So nobody finds half of one.
#pragma once

#include <type_traits>

namespace eet {

// Returns when the kernel before this one has ended and what it wrote can be read.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks begin once every block of this one has said so (or ended), where there is room for them.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For wait_for_previous(): bits that depend on the whole number.
template <typename T>
__device__ inline int bits_of(T value) {
  static_assert(sizeof(T) == 4, "a wider number could become negative");
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_int(value);
  } else {
    return int(value);
  }
}

// The same, with these numbers computed by then; none may be negative. Else the compiler computes them where they are used:
// behind the wait, where each instruction delays the block (LOG). Since none is negative, the predicate always holds, and
// the kernel always waits; the compiler cannot prove that, and has to compute all of them first.
template <typename... Numbers>
__device__ inline void wait_for_previous(Numbers... computed) {
#if __CUDA_ARCH__ >= 900
  const int bits = (... | bits_of(computed));
  asm volatile("{\n  .reg .pred p;\n  setp.ne.s32 p, %0, -1;\n  @p griddepcontrol.wait;\n}" ::"r"(bits)
               : "memory");
#endif
}

}  // namespace eet
