// Two warps that share query rows. For head dims over 128 one warp cannot hold 32 rows of O, and with 16 rows it would
// read every K and V fragment for half as much work, which binds on shared memory. So a pair of warps shares 32 rows:
// each takes half of a tile's keys for S and half of head_dim_v for O, and they swap row maxima, weights and, at the
// end, row sums.
#pragma once

#include "core/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/named_barrier.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

// Barrier of the 64 threads of one pair; barrier 0 is __syncthreads().
__device__ __forceinline__ void pair_sync(int pair) {
  named_barrier_sync<64>(pair + 1);
}

template <class F>
__device__ __forceinline__ float combine_chunk(const uint4& x, F&& f) {
  return f(f(__uint_as_float(x.x), __uint_as_float(x.y)), f(__uint_as_float(x.z), __uint_as_float(x.w)));
}

// Combines the eight values of each row, of four lanes in each warp of the pair, with f. By way of sRow (2, rows, 4),
// which takes one trip where shuffles would come before it; a barrier must come before sRow is used again.
template <int Rows, int MTiles, class F>
__device__ __forceinline__ void combine_rows(float (&value)[MTiles][2], unsigned sRow, int pair, int side, int row,
                                             int lane, F&& f) {
  const unsigned own = sRow + 16 * (side * Rows + row), other = sRow + 16 * ((1 - side) * Rows + row);
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) store_shared(own + 16 * (16 * m + 8 * half) + 4 * (lane % 4), value[m][half]);
  pair_sync(pair);
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int offset = 16 * (16 * m + 8 * half);
      value[m][half] =
          f(combine_chunk(load_shared_chunk(own + offset), f), combine_chunk(load_shared_chunk(other + offset), f));
    }
}

// The warp's weights to its half of the columns of sP (rows, TileN), for the partner to read as an A operand.
template <int TileN, int MTiles, int KBlocks>
__device__ __forceinline__ void publish_weights(unsigned sP, const unsigned (&rP)[KBlocks][MTiles][4], int row,
                                                int first_chunk, int lane) {
  static_assert(2 * KBlocks == TileLayout<TileN>::span_blocks, "a half of the keys is a part of one span");
#pragma unroll
  for (int k = 0; k < KBlocks; ++k)
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row + 16 * m + 8 * (i % 2);
        const unsigned target = sP + TileLayout<TileN>::offset(r, first_chunk ^ (2 * k + i / 2)) + 4 * (lane % 4);
        store_shared(target, rP[k][m][i]);
      }
}

}  // namespace cuflash
