// Bit fields (PTX ISA, "Logic and Shift Instructions: shl").
#pragma once

namespace cuflash {

// Bits `position` and up; none from 32 on, and all below 0. shl takes an unsigned amount and clamps it at 32.
__device__ __forceinline__ unsigned bits_from(int position) {
  unsigned bits;
  asm("shl.b32 %0, 0xFFFFFFFF, %1;" : "=r"(bits) : "r"(max(position, 0)));
  return bits;
}

}  // namespace cuflash
