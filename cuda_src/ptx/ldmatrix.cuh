// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory to mma fragments (PTX ISA, "ldmatrix"; sm_75+).
#pragma once

namespace cuflash {

// Volatile: the loads must stay behind the barrier that publishes the tile.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

}  // namespace cuflash
