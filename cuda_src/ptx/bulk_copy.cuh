// Plain arrays and the copy engine (PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk"; sm_90).
#pragma once

namespace cuflash {

// `bytes`, a multiple of 16, to shared memory; both addresses are multiples of 16. They count towards the barrier's
// phase.
__device__ __forceinline__ void bulk_load(unsigned shared, const void* global, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Adds `bytes` of float32 in shared memory to those in global memory, by the rules above. The order of additions by
// several threads is open.
__device__ __forceinline__ void bulk_add(float* global, unsigned shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's additions have read shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until they are made.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace cuflash
