// Barriers of Threads threads of the block (PTX ISA, "bar, barrier"). Barrier 0 is __syncthreads().
#pragma once

namespace cuflash {

template <int Threads>
__device__ __forceinline__ void named_barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

// Counts in without waiting.
template <int Threads>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

// Waits, and says whether any of the threads voted.
template <int Threads>
__device__ __forceinline__ bool named_barrier_or(int barrier, bool vote) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred vote, any;\n"
      "setp.ne.s32 vote, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, vote;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "n"(Threads), "r"(static_cast<int>(vote))
      : "memory");
  return any != 0;
}

}  // namespace cuflash
