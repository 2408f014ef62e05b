// stmatrix: four 8x8 matrices of 16-bit elements from mma fragments to shared memory (PTX ISA, "stmatrix"; sm_90).
#pragma once

namespace cuflash {

// Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(unsigned shared, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace cuflash
