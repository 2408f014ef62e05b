#pragma once

namespace cuflash {

inline bool elect_one() {
  return emulator::lane() == 0;
}

inline int warp_uniform(int value) {
  return __shfl_sync(0xFFFFFFFFu, value, 0);
}

inline int in_uniform_register(int value) {
  return static_cast<int>(__reduce_or_sync(0xFFFFFFFFu, static_cast<unsigned>(value)));
}

}  // namespace cuflash
