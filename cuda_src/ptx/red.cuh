// Additions to global memory whose old value nobody asks for (PTX ISA, "Parallel Synchronization: red").
#pragma once

namespace cuflash {

// Width 4 needs sm_90 and 16-byte alignment. The order of additions by several threads is open.
template <int Width>
__device__ __forceinline__ void reduce_add(float* address, const float (&value)[Width]);

template <>
__device__ __forceinline__ void reduce_add<1>(float* address, const float (&value)[1]) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value[0]) : "memory");
}

template <>
__device__ __forceinline__ void reduce_add<4>(float* address, const float (&value)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
}

}  // namespace cuflash
