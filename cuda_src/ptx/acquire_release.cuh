// Words in global memory by which blocks tell each other what they have done (PTX ISA, "Memory Consistency Model").
#pragma once

namespace cuflash {

// What was written before the value that this reads was released is there for what follows.
__device__ __forceinline__ unsigned load_acquire(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// By one thread after a barrier, for all that its block has written before the barrier.
__device__ __forceinline__ void store_release(unsigned* address, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace cuflash
