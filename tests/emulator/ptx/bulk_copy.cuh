#pragma once

#include "ptx/mbarrier.cuh"

namespace cuflash {

inline void bulk_load(unsigned target, const void* source, int bytes, unsigned barrier) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16)
    emulator::fail("a bulk copy that is not aligned");
  emulator::copy_towards(barrier, [=]() -> long {
    std::memcpy(emulator::shared_pointer(target, bytes, 16), source, bytes);
    return bytes;
  });
}

// In the thread's groups of copies, whose shared memory is read when they are waited for.
inline void bulk_add(float* target, unsigned source, int bytes) {
  if (source % 16 || reinterpret_cast<uintptr_t>(target) % 16 || bytes % 16)
    emulator::fail("a bulk addition that is not aligned");
  emulator::start(emulator::state.current->copies, [=] {
    for (int i = 0; i < bytes / 4; ++i) target[i] += emulator::read_shared<float>(source + 4 * i);
  });
}

inline void bulk_commit() {
  emulator::commit(emulator::state.current->copies);
}

inline void bulk_wait_read() {
  emulator::wait_for_all_but(emulator::state.current->copies, 0);
}

inline void bulk_wait() {
  bulk_wait_read();
}

}  // namespace cuflash
