// cp.async: asynchronous copies from global to shared memory (PTX ISA, "Data Movement and Conversion: cp.async";
// sm_80+).
#pragma once

namespace cuflash {

// Copies Bytes (4, 8 or 16); bytes past `valid` are zero-filled and not read.
template <int Bytes>
__device__ __forceinline__ void cp_async(unsigned shared, const void* global, int valid) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(Bytes), "r"(valid)
                 : "memory");
  }
}

template <int Bytes>
__device__ __forceinline__ void cp_async(unsigned shared, const void* global) {
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(Bytes) : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most Pending of this thread's committed groups are still in flight.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace cuflash
