// Whole numbers of 8 bits, made the numbers that tensor cores take; exact, since both types hold -128 to 127.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace eet {

// Four int8 as two registers of two numbers, in order. A byte becomes the low bits of a number whose exponent makes the
// lowest bit 1; what that adds is taken off again. Two instructions a number pair instead of four slow conversions.
// Source: Kim et al. 2022, "Who Says Elephants Can't Run", as in FasterTransformer's interleaved converters.
template <typename T>
__device__ void widen(uint32_t four, uint32_t (&pairs)[2]);

template <>
__device__ inline void widen<__half>(uint32_t four, uint32_t (&pairs)[2]) {
  constexpr uint32_t kExponent = 0x64646464;  // 0x6400 is 1024
  const uint32_t above = 0x64806480;          // 1024, and 128 since the sign bit is turned to make the byte unsigned
  four ^= 0x80808080;
  pairs[0] = __byte_perm(four, kExponent, 0x4140);
  pairs[1] = __byte_perm(four, kExponent, 0x4342);
#pragma unroll
  for (uint32_t& pair : pairs) {
    const __half2 value = __hsub2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(above));
    pair = reinterpret_cast<const uint32_t&>(value);
  }
}

// By way of fp32, whose upper half is the bf16: 7 bits of fraction are too few for the sum with a large power of two.
template <>
__device__ inline void widen<__nv_bfloat16>(uint32_t four, uint32_t (&pairs)[2]) {
  constexpr uint32_t kExponent = 0x4b000000;  // 2^23
  four ^= 0x80808080;
  uint32_t bits[4] = {__byte_perm(four, kExponent, 0x7650), __byte_perm(four, kExponent, 0x7651),
                      __byte_perm(four, kExponent, 0x7652), __byte_perm(four, kExponent, 0x7653)};
#pragma unroll
  for (uint32_t& each : bits) each = __float_as_uint(__uint_as_float(each) - 8388736.f);
  pairs[0] = __byte_perm(bits[0], bits[1], 0x7632);
  pairs[1] = __byte_perm(bits[2], bits[3], 0x7632);
}

// The same to fp32, one number a register.
__device__ inline void widen(uint32_t four, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = float(int(four << (24 - 8 * i)) >> 24);
}

}  // namespace eet
