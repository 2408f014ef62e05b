// Special registers (PTX ISA, "Special Registers").
#pragma once

namespace cuflash {

// threadIdx.x in a form the compiler does not keep alive between uses.
__device__ __forceinline__ int rematerialized_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A copy of a number: what is computed from it is not kept in registers from one iteration of a loop to the next.
__device__ __forceinline__ unsigned made_anew(unsigned value) {
  unsigned copy;
  asm volatile("mov.u32 %0, %1;" : "=r"(copy) : "r"(value));
  return copy;
}

}  // namespace cuflash
