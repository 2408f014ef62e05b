// Atomics on global memory (PTX ISA, "atom").
#pragma once

namespace cuflash {

// The value before.
__device__ __forceinline__ unsigned atomic_add(unsigned* address, unsigned value) {
  unsigned before;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

}  // namespace cuflash
