// The float32 sums of dQ that many blocks add to, in the order of the mma fragments that they come from: a block of 16
// rows is tile_d / 8 fragments of 16 x 8, each 32 lanes x 4 numbers. A warp then adds to whole cache lines, where rows
// would give each instruction eight pieces of 32 bytes. Both indices may come first: Width numbers of a lane together.
#pragma once

#include "core/params.cuh"
#include "ptx/red.cuh"

namespace cuflash {

template <int TileD, int Width>
struct QueryGradientSum {
  static_assert(Width == 1 || Width == 4, "the widths of red.global.add.f32");
  static constexpr int fragment = 16 * 8;  // numbers

  float* base;  // row `row_begin` of a head, a multiple of 16

  static __device__ __forceinline__ QueryGradientSum of_rows(const BackwardParams& p, int batch, int head,
                                                             int row_begin) {
    const int64 row = (static_cast<int64>(batch) * p.heads_q + head) * p.padded_rows + row_begin;
    return {p.dq_sum + row * TileD};
  }

  // This lane's part of the fragment at 16-row block `row_block` and 8-column block `column_block`.
  __device__ __forceinline__ float* at(int row_block, int column_block, int lane) const {
    return base + distance(row_block, column_block) + lane * Width;
  }

  // The number of a row and column.
  __device__ __forceinline__ float* number(int row, int column) const {
    const int lane = row % 8 * 4 + column % 8 / 2, i = row % 16 / 8 * 2 + column % 2;
    return at(row / 16, column / 8, 0) + (Width == 4 ? 4 * lane + i : 32 * i + lane);
  }

  static constexpr __device__ __forceinline__ int distance(int row_blocks, int column_blocks) {
    return (row_blocks * (TileD / 8) + column_blocks) * fragment;
  }

  static __device__ __forceinline__ void add(float* target, const float (&value)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += Width) {
      float part[Width];
#pragma unroll
      for (int w = 0; w < Width; ++w) part[w] = value[i + w];
      reduce_add<Width>(target + 32 * i, part);
    }
  }

  static __device__ __forceinline__ float4 load(const float* source) {
    if constexpr (Width == 4) {
      return *reinterpret_cast<const float4*>(source);
    } else {
      return make_float4(source[0], source[32], source[64], source[96]);
    }
  }
};

}  // namespace cuflash
