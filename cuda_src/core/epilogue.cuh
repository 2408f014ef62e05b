// Writing a finished output tile: normalise, round, transpose through shared memory, store whole rows.
#pragma once

#include "core/softmax.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

// Stores one row chunk of 8 elements in pieces of VectorBytes; elements from `valid` on are left alone.
template <int VectorBytes>
__device__ __forceinline__ void store_chunk(char* target, const uint4& chunk, int valid) {
  if constexpr (VectorBytes == 16) {
    if (valid >= 8) {
      *reinterpret_cast<uint4*>(target) = chunk;
      return;
    }
  }
  const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (VectorBytes >= 4 && 2 * w + 1 < valid) {
      *reinterpret_cast<unsigned*>(target + 4 * w) = words[w];
    } else {
      if (2 * w < valid) *reinterpret_cast<unsigned short*>(target + 4 * w) = static_cast<unsigned short>(words[w]);
      if (2 * w + 1 < valid)
        *reinterpret_cast<unsigned short*>(target + 4 * w + 2) = static_cast<unsigned short>(words[w] >> 16);
    }
  }
}

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

// The log-sum-exp of one warp's rows; the lane of a quad that owns column 0 writes.
template <int MTiles>
__device__ __forceinline__ void store_lse(float* gLse, const OnlineSoftmax<MTiles>& softmax, float exp2_scale,
                                          int warp_row, int rows_left, int lane) {
  if (gLse == nullptr || lane % 4 != 0) return;
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + 8 * half + lane / 4;
      if (row < rows_left) gLse[row] = softmax.lse(m, half, exp2_scale);
    }
}

}  // namespace cuflash
