// Special registers (PTX ISA, "Special Registers").
#pragma once

namespace cuflash {

// threadIdx.x in a form the compiler does not keep alive between uses.
__device__ __forceinline__ int rematerialized_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace cuflash
