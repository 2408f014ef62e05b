// Barriers of a part of the block (PTX ISA, "bar, barrier"). Barrier 0 is __syncthreads().
#pragma once

namespace cuflash {

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts in without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits, and says whether any of the threads voted.
__device__ __forceinline__ bool named_barrier_or(int barrier, int threads, bool vote) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred vote, any;\n"
      "setp.ne.s32 vote, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, vote;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(vote))
      : "memory");
  return any != 0;
}

}  // namespace cuflash
