#pragma once

namespace cuflash {

// Blocks run one after the other, so that what one waits for must have been done by those before it.
inline unsigned load_acquire(const unsigned* address) {
  emulator::yield();
  return *address;
}

inline void store_release(unsigned* address, unsigned value) {
  *address = value;
}

}  // namespace cuflash
