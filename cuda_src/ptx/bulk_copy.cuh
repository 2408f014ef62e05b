// Copies of plain arrays by the copy engine (PTX ISA, "cp.async.bulk"; sm_90).
#pragma once

namespace cuflash {

// `bytes`, a multiple of 16, to shared memory; both addresses are multiples of 16. They count towards the barrier's
// phase.
__device__ __forceinline__ void bulk_load(unsigned shared, const void* global, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace cuflash
