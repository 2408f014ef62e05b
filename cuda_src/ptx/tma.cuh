// Tensor copies by the copy engine (PTX ISA, "cp.async.bulk.tensor", "prefetch.tensormap"; sm_90).
#pragma once

#include "core/types.cuh"

namespace cuflash {

// What cuTensorMapEncodeTiled makes.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// How long the L2 cache should keep what a copy reads (createpolicy's encodings of these fixed policies).
constexpr uint64 kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One box at (column, row, head, batch) to shared memory; its bytes count towards the barrier's phase.
__device__ __forceinline__ void tma_load(unsigned shared, const TensorMap& map, unsigned barrier, int column, int row,
                                         int head, int batch, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace cuflash
