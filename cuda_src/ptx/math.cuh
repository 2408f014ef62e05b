// Special-function-unit approximations (PTX ISA, "Floating Point Instructions: ex2, rcp").
#pragma once

namespace cuflash {

// 2^x, at most 2 ulp; subnormal results flush to 0, which a softmax weight relative to the row maximum never misses.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Correctly rounded 1/x, for once-a-row work.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuflash
