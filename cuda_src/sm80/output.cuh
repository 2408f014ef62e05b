// Writing a finished output tile: normalise, round, transpose through shared memory, store whole rows.
#pragma once

#include "core/epilogue.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

// One warp's rows and part of the columns of O to sO (tile_m, Dim). Says whether any of it is inf or NaN.
template <class Element, int Dim, int Parts, int MTiles, int DTiles>
__device__ __forceinline__ bool stage_output(unsigned sO, const float (&rO)[MTiles][DTiles][4],
                                             const OnlineSoftmax<MTiles>& softmax, int warp_row, int side, int lane) {
  unsigned zero = 0;
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = softmax.inverse_sum(m, half);
      const int row = warp_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int d = 0; d < DTiles; ++d) {
        const unsigned pair = pack<Element>(rO[m][d][2 * half] * inverse, rO[m][d][2 * half + 1] * inverse);
        const int chunk = TileLayout<Dim>::template part_chunk<Parts>(side, d);
        const unsigned target = sO + TileLayout<Dim>::offset(row, chunk) + 4 * (lane % 4);
        store_shared(target, pair);
        zero = add_zero_times<Element>(pair, zero);
      }
    }
  return any_nonfinite<Element>(zero);
}

// Rows [first_row, first_row + Rows) of sO to global memory by Threads threads: each moves 16-byte chunks of whole
// rows.
template <int Dim, int Rows, int Threads, int VectorBytes, bool ExactDim>
__device__ __forceinline__ void store_output(unsigned sO, char* gO, int64 row_stride, int first_row, int rows_left,
                                             int head_dim, int thread) {
  constexpr int chunks = Dim / 8;
#pragma unroll
  for (int index = thread; index < Rows * chunks; index += Threads) {
    const int row = first_row + index / chunks;
    const int chunk = index % chunks;
    const uint4 data = load_shared_chunk(sO + TileLayout<Dim>::offset(row, chunk));
    const int valid = ExactDim ? 8 : head_dim - 8 * chunk;
    if (row < rows_left) store_chunk<VectorBytes>(gO + row * row_stride + 16 * chunk, data, valid);
  }
}

}  // namespace cuflash
