// Tiles in shared memory as the copy engine writes them and wgmma reads them: panels of 64 columns (128 bytes) in
// 128-byte swizzle, or of 32 columns in 64-byte swizzle where 64 does not divide the head dim. A panel holds all rows.
#pragma once

#include "core/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace cuflash {

template <int Rows, int Columns>
struct PanelLayout {
  static constexpr int panel_columns = Columns % 64 == 0 ? 64 : 32;
  static constexpr int panels = Columns / panel_columns;
  static constexpr int row_bytes = 2 * panel_columns;
  static constexpr int panel_bytes = Rows * row_bytes;
  static constexpr int bytes = panels * panel_bytes;
  static constexpr Swizzle swizzle = panel_columns == 64 ? Swizzle::bytes_128 : Swizzle::bytes_64;
  static_assert(Columns % 32 == 0 && panel_bytes % 1024 == 0, "panels start where the swizzle repeats");

  // An operand whose columns are the depth of the product (Q, K), or whose rows are (V).
  static constexpr uint64 columns_deep = matrix_descriptor(swizzle, 16, 8 * row_bytes);
  static constexpr uint64 rows_deep = matrix_descriptor(swizzle, panel_bytes, 8 * row_bytes);

  // Byte offset of columns 16 * block and on.
  static constexpr __device__ int column_block(int block) {
    return block * 16 / panel_columns * panel_bytes + block * 16 % panel_columns * 2;
  }

  // Byte offset of the 16-byte chunk of 8 columns.
  static __device__ __forceinline__ int chunk(int row, int chunk) {
    constexpr int chunks = panel_columns / 8;
    const int phase = panel_columns == 64 ? row % 8 : row / 2 % 4;
    return chunk / chunks * panel_bytes + row * row_bytes + ((chunk % chunks) ^ phase) * 16;
  }

  // By one thread: starts the copy of a tile, which completes the phase of `barrier` with `more` bytes of other copies.
  static __device__ __forceinline__ void load(unsigned shared, const TensorMap& map, unsigned barrier, int row,
                                              int head, int batch, uint64 policy, int more = 0) {
    mbarrier_arrive_expect(barrier, bytes + more);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
      tma_load(shared + panel * panel_bytes, map, barrier, panel * panel_columns, row, head, batch, policy);
  }
};

}  // namespace cuflash
