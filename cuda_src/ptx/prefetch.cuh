// prefetch: a hint to bring a cache line into L2 (PTX ISA, "prefetch").
#pragma once

namespace cuflash {

__device__ __forceinline__ void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

}  // namespace cuflash
