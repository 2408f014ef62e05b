// Conversions between float32 and 16-bit types (PTX ISA, "Data Movement and Conversion Instructions: cvt").
#pragma once

namespace cuflash {

// Rounded to nearest; `low` in the lower half.
__device__ __forceinline__ unsigned bfloat16_pair(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ unsigned float16_pair(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float float16_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace cuflash
