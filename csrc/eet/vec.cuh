// 16-byte vectors: how every kernel reads and writes memory, and how it gets at the numbers inside.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace eet {

template <typename T>
constexpr int kVec = 16 / sizeof(T);  // numbers in a vector

__device__ inline uint4 zeros() { return make_uint4(0, 0, 0, 0); }

// 0, which the compiler does not know: blocks have one row of threads. `x & opaque_zero()` is 0 too, but nothing that
// takes it can begin before x is there.
__device__ inline uint32_t opaque_zero() { return blockDim.y - 1; }

template <typename T>
__device__ inline uint4 load(const T* p) {
  return *reinterpret_cast<const uint4*>(p);
}

template <typename T>
__device__ inline void store(T* p, uint4 v) {
  *reinterpret_cast<uint4*>(p) = v;
}

// From shared memory by its address.
__device__ inline uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ inline void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Half a vector of it.
__device__ inline uint2 load_shared_half(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// For what is read once: weights and old keys and values. It does not push anything out of L1.
template <typename T>
__device__ inline uint4 load_once(const T* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// For what other blocks wrote while this one was running: L1 may have older contents.
template <typename T>
__device__ inline uint4 load_from_l2(const T* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// For what no kernel writes, such as weights: such loads may be moved ahead of stores.
template <typename T>
__device__ inline uint4 load_constant(const T* p) {
  return __ldg(reinterpret_cast<const uint4*>(p));
}

// By all of a block: brings what no kernel writes to L2, before it can be of use.
template <typename T>
__device__ inline void prefetch(const T* p, int count) {
  constexpr int kLine = 128 / sizeof(T);
  for (int i = threadIdx.x * kLine; i < count; i += blockDim.x * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p + i));
  }
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <typename T>
__device__ inline void unpack(uint4 v, float (&x)[kVec<T>]) {
  const T* parts = reinterpret_cast<const T*>(&v);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) x[i] = to_float(parts[i]);
}

template <typename T>
__device__ inline uint4 pack(const float (&x)[kVec<T>]) {
  uint4 v;
  T* parts = reinterpret_cast<T*>(&v);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) parts[i] = from_float<T>(x[i]);
  return v;
}

// Two 16-bit numbers in a register, the first in the lower half.
template <typename T>
__device__ inline uint32_t pack2(float low, float high) {
  const T low16 = from_float<T>(low), high16 = from_float<T>(high);
  return uint32_t(reinterpret_cast<const uint16_t&>(high16)) << 16 | reinterpret_cast<const uint16_t&>(low16);
}

}  // namespace eet
