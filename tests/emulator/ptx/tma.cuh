#pragma once

#include "core/types.cuh"

namespace cuflash {

// Not the driver's format but that of tests/emulator/emulator.py.
struct alignas(64) TensorMap {
  const char* address;
  int64 size[4], stride[4];  // (dim, row, head, batch); bytes
  int columns, rows;         // of a box
  int swizzle_bytes;
  char padding[128 - 8 - 64 - 12];
};

constexpr uint64 kEvictFirst = 0, kEvictLast = 0;

inline void prefetch_tensor_map(const TensorMap&) {}

// Where the copy engine and wgmma put a byte: address bits 4 to 6 (5) are XORed with bits 7 to 9 (8).
inline unsigned swizzled(unsigned address, int swizzle_bytes) {
  return address ^ (address >> 7 & (swizzle_bytes / 16 - 1)) << 4;
}

inline void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int column, int row, int head, int batch,
                     uint64) {
  const auto copy = [=, &map]() -> long {
    for (int r = 0; r < map.rows; ++r)
      for (int c = 0; c < map.columns; ++c) {
        const int64 at[4] = {column + c, row + r, head, batch};
        bool inside = true;
        const char* source = map.address;
        for (int i = 0; i < 4; ++i) {
          inside &= at[i] >= 0 && at[i] < map.size[i];
          source += at[i] * map.stride[i];
        }
        unsigned short element = 0;
        if (inside) std::memcpy(&element, source, 2);
        emulator::write_shared(swizzled(target + r * map.swizzle_bytes + 2 * c, map.swizzle_bytes), element);
      }
    return 2l * map.rows * map.columns;
  };
  emulator::copy_towards(barrier, copy);
}

}  // namespace cuflash
