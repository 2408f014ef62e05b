#pragma once

namespace cuflash {

inline unsigned atomic_add(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
  return before;
}

}  // namespace cuflash
