// Conversions between float and packed pairs of 16-bit numbers, and one fused multiply-add on such pairs (PTX ISA,
// "cvt" and "Half Precision Floating-Point Instructions: fma"; sm_80+).
#pragma once

namespace cuflash {

__device__ __forceinline__ unsigned pack_bfloat16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ unsigned pack_float16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float unpack_float16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// a * b + c in both halves.
__device__ __forceinline__ unsigned fma_bfloat16(unsigned a, unsigned b, unsigned c) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
}

__device__ __forceinline__ unsigned fma_float16(unsigned a, unsigned b, unsigned c) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
}

}  // namespace cuflash
