#pragma once

namespace cuflash {

// Copies `valid` bytes and fills the rest with zeros.
template <int Bytes>
void cp_async(unsigned shared_address, const void* global, int valid) {
  if (reinterpret_cast<uintptr_t>(global) % Bytes) emulator::fail("cp.async from an address that is not aligned");
  char* target = emulator::shared_pointer(shared_address, Bytes, Bytes);
  emulator::start(emulator::state.current->copies, [=] {
    std::memset(target, 0, Bytes);
    std::memcpy(target, global, valid);
  });
}

template <int Bytes>
void cp_async(unsigned shared_address, const void* global) {
  cp_async<Bytes>(shared_address, global, Bytes);
}

inline void cp_async_commit() {
  emulator::commit(emulator::state.current->copies);
}

template <int Pending>
void cp_async_wait() {
  emulator::wait_for_all_but(emulator::state.current->copies, Pending);
}

}  // namespace cuflash
