// Hopper's tensor cores: a warpgroup (4 warps) multiplies in the background, from tiles in shared memory (sm_90a).
//
// A tile has rows of 64 16-bit numbers (128 bytes) and begins at a multiple of 1024 bytes; 16-byte part p of row r lies
// where part p ^ (r % 8) would: the copy engine's 128-byte swizzle. Wider matrices are several tiles, side by side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "eet/mma.cuh"

namespace eet {

// How the tensor cores find a tile: address, bytes to the tile beside it, 1024 bytes to the next 8 rows, the swizzle.
__device__ inline uint64_t tile_of(const void* start, int tile_bytes = 16) {
  const uint64_t address = (shared_address(start) & 0x3ffff) >> 4, aside = tile_bytes >> 4, down = 1024 >> 4;
  return address | aside << 16 | down << 32 | uint64_t(1) << 62;
}

// The same tile from another byte on: a multiple of 32 along a row, of 1024 down.
__device__ inline uint64_t further(uint64_t tile, int bytes) { return tile + (bytes >> 4); }

// Before the first product, and after any other use of the registers that a product reads or writes.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `pending` of the newest groups of products are still under way.
template <int pending>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of registers over a wait for the products that read or write them.
template <int n>
__device__ inline void settle(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

template <int n>
__device__ inline void settle(uint32_t (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// The registers of each of a warpgroup's threads from here on: a multiple of 8.
template <int count>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// c[64,N] (+)= a[64,16] * b[16,N]: warp w of the warpgroup holds rows 16w to 16w + 15 of c, laid out as by mma() (c[4i]
// to c[4i+3] are columns 8i to 8i + 7).
// Here a and b lie in shared memory, in rows of numbers to be multiplied: a as [64,16], b as [N,16].
template <typename T, int N>
__device__ void product(float (&c)[N / 2], uint64_t a, uint64_t b, bool accumulate);

// c += a * b with a in registers, as for mma(), and b in shared memory as [16,N].
template <typename T, int N>
__device__ void product(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b);

#define EET_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EET_C16(i) EET_C4(i), EET_C4(i + 4), EET_C4(i + 8), EET_C4(i + 12)
#define EET_C32 EET_C16(0), EET_C16(16)
#define EET_C64 EET_C32, EET_C16(32), EET_C16(48)
#define EET_LIST16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define EET_LIST32 \
  EET_LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EET_LIST64                                                                                               \
  EET_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
             "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EET_PRODUCTS(TYPE, NAME, N, C, LIST, P0, P1, P2, P3, P4, P5)                                                \
  template <>                                                                                                      \
  __device__ inline void product<TYPE, N>(float (&c)[N / 2], uint64_t a, uint64_t b, bool accumulate) {            \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " P2 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #N         \
                 "k16.f32." NAME "." NAME " {" LIST "}, " P0 ", " P1 ", p, 1, 1, 0, 0;\n\t}"                       \
                 : C                                                                                               \
                 : "l"(a), "l"(b), "r"(int(accumulate)));                                                          \
  }                                                                                                                \
  template <>                                                                                                      \
  __device__ inline void product<TYPE, N>(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b) {                 \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " P5 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #N         \
                 "k16.f32." NAME "." NAME " {" LIST "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", p, 1, 1, 1;\n\t}" \
                 : C                                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                    \
  }
EET_PRODUCTS(__half, "f16", 32, EET_C16(0), EET_LIST16, "%16", "%17", "%18", "%19", "%20", "%21")
EET_PRODUCTS(__nv_bfloat16, "bf16", 32, EET_C16(0), EET_LIST16, "%16", "%17", "%18", "%19", "%20", "%21")
EET_PRODUCTS(__half, "f16", 64, EET_C32, EET_LIST32, "%32", "%33", "%34", "%35", "%36", "%37")
EET_PRODUCTS(__nv_bfloat16, "bf16", 64, EET_C32, EET_LIST32, "%32", "%33", "%34", "%35", "%36", "%37")
EET_PRODUCTS(__half, "f16", 128, EET_C64, EET_LIST64, "%64", "%65", "%66", "%67", "%68", "%69")
EET_PRODUCTS(__nv_bfloat16, "bf16", 128, EET_C64, EET_LIST64, "%64", "%65", "%66", "%67", "%68", "%69")
#undef EET_PRODUCTS
#undef EET_LIST64
#undef EET_LIST32
#undef EET_LIST16
#undef EET_C64
#undef EET_C32
#undef EET_C16
#undef EET_C4

}  // namespace eet
