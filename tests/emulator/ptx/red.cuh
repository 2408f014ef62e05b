#pragma once

namespace cuflash {

template <int Width>
void reduce_add(float* address, const float (&value)[Width]) {
  if (reinterpret_cast<uintptr_t>(address) % (4 * Width)) emulator::fail("red to an address that is not aligned");
  for (int i = 0; i < Width; ++i) address[i] += value[i];
}

}  // namespace cuflash
