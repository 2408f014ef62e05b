// Warpgroup matrix products (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; sm_90a).
//
// The products themselves are struct Wgmma<N, Element>, which cuflash/wgmma.py writes in front of the kernel for the
// few N that a Config uses: an instruction names each of its N / 2 accumulators.
//   rs, ss: d (64 x N) += a (64 x 16) * b (16 x N), with a from registers or shared memory
// TransposeA, TransposeB: whether rows of that operand in shared memory are the product's depth.
// Accumulators are d[0][n][4], 8 columns for each n, in the layout of mma.sync m16n8k16 for 16 rows a warp.
#pragma once

#include "core/types.cuh"

namespace cuflash {

enum class Swizzle { bytes_128 = 1, bytes_64 = 2 };

// Shared memory descriptor but for the address (PTX ISA, "Matrix descriptor"). Byte offsets between 8-row groups
// (stride) and, for an operand whose rows are the product's depth, between panels of columns (leading).
__device__ constexpr uint64 matrix_descriptor(Swizzle swizzle, int leading_bytes, int stride_bytes) {
  return static_cast<uint64>(leading_bytes >> 4) << 16 | static_cast<uint64>(stride_bytes >> 4) << 32 |
         static_cast<uint64>(swizzle) << 62;
}

// Orders registers and shared memory written so far before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most Pending committed groups are still running.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving uses of accumulators over this point.
template <int Blocks>
__device__ __forceinline__ void pin_accumulators(float (&d)[1][Blocks][4]) {
#pragma unroll
  for (int n = 0; n < Blocks; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[0][n][i])::"memory");
}

}  // namespace cuflash
