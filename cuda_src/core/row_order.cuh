// The order in which numbers of query rows lie where a thread needs those of its columns of a transposed mma fragment:
// of 64 rows, columns 2 * q and 2 * q + 1 of all 8 blocks come together.
#pragma once

namespace cuflash {

struct RowOrder {
  static constexpr int group = 64;

  // Where row `row` lies.
  static __device__ __forceinline__ int index(int row) {
    const int q = row % 8 / 2, block = row % group / 8;
    return row / group * group + 16 * q + 2 * block + row % 2;
  }

  // Byte offset of the 16 numbers of lanes with lane % 4 = q in a group of rows.
  static __device__ __forceinline__ int bytes(int group_index, int q) { return 4 * (group * group_index + 16 * q); }
};

}  // namespace cuflash
