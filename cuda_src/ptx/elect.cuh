// Electing one thread of a converged warp (PTX ISA, "elect.sync"; sm_90), and values that all its threads share.
#pragma once

namespace cuflash {

__device__ __forceinline__ bool elect_one() {
  int elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xFFFFFFFF;\n"
      "selp.s32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// The first lane's value, which the compiler then knows to be the same in all.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
}

// The same by way of a reduction, whose result is in a uniform register. Loops bounded by such values keep their
// counters in uniform registers, and wgmma finds its descriptors there; otherwise each is moved in front of its
// instruction.
__device__ __forceinline__ int in_uniform_register(int value) {
  return static_cast<int>(__reduce_or_sync(0xFFFFFFFFu, static_cast<unsigned>(value)));
}

}  // namespace cuflash
