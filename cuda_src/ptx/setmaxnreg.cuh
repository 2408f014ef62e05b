// Moving registers between warpgroups (PTX ISA, "setmaxnreg"; sm_90a). The kernel's launch bounds must name one block.
#pragma once

namespace cuflash {

template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace cuflash
