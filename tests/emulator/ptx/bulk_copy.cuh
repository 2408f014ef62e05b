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

}  // namespace cuflash
