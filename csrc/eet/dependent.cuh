// Dependent launch (sm_90 and later): a kernel may begin while the one before it still runs.
//
// A kernel that is launched so may at once request what no kernel of the step writes: weights, and the keys and values of
// earlier steps. It calls wait_for_previous() in every block before it reads or writes anything else. Kernels launched
// without the attribute pass both calls at once.
// One kernel of a step (whichever embeds the new tokens) lets the next begin only after its own wait, so that whatever
// begins in a step finds the steps before it complete.
#pragma once

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

}  // namespace eet
