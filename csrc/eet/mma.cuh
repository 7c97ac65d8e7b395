// Tensor cores and asynchronous copies, as on every GPU from sm_80 on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace eet {

// c[16,8] += a[16,16] * b[16,8] by one warp, accumulated in fp32. With g = lane / 4 and t = lane % 4 a lane holds
//   a0: row g,     k 2t and 2t+1      a2: row g,     k 2t+8 and 2t+9     b0: k 2t and 2t+1,   column g
//   a1: row g + 8, k 2t and 2t+1      a3: row g + 8, k 2t+8 and 2t+9     b1: k 2t+8 and 2t+9, column g
//   c0, c1: row g, columns 2t and 2t+1                                   c2, c3: row g + 8
template <typename T>
__device__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);

// The same of half as many: c[16,8] += a[16,8] * b[8,8], with a0, a1 and b0 alone.
template <typename T>
__device__ void mma_short(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0);

#define EET_MMA(TYPE, NAME)                                                                                   \
  template <>                                                                                                 \
  __device__ inline void mma<TYPE>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,         \
                                   uint32_t b0, uint32_t b1) {                                                \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                                \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                              \
  }                                                                                                           \
  template <>                                                                                                 \
  __device__ inline void mma_short<TYPE>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {              \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "       \
        "{%0, %1, %2, %3};"                                                                                   \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
        : "r"(a0), "r"(a1), "r"(b0));                                                                         \
  }
EET_MMA(__half, "f16")
EET_MMA(__nv_bfloat16, "bf16")
#undef EET_MMA

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Four 8x8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  load_matrices_transposed(r, shared_address(row));
}

// The opposite of load_matrices (sm_90 and later).
__device__ inline void store_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// 16 bytes from global to shared memory, in the background; zeros where `valid` is false, and nothing is read.
__device__ inline void copy_async(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` of the newest groups are still under way.
template <int pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace eet
