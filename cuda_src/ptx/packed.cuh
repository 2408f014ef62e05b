// Arithmetic on pairs of 16-bit numbers (PTX ISA, "Half Precision Floating Point Instructions: fma").
#pragma once

namespace cuflash {

// a * b + c in both halves.
__device__ __forceinline__ unsigned fma_bfloat16_pair(unsigned a, unsigned b, unsigned c) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
}

__device__ __forceinline__ unsigned fma_float16_pair(unsigned a, unsigned b, unsigned c) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
}

}  // namespace cuflash
