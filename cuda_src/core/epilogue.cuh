// Writing results: chunks of output rows, and the log-sum-exp.
#pragma once

#include "core/scheduler.cuh"
#include "core/softmax.cuh"

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

// Where the rows of a query tile from `row_begin` on go in the output.
__device__ __forceinline__ char* output_rows(const ForwardParams& p, const TileCoordinate& c, int row_begin) {
  return static_cast<char*>(p.out) + c.batch * p.out_batch + c.head * p.out_head + row_begin * p.out_row;
}

// The same in the log-sum-exp; null when none is wanted.
__device__ __forceinline__ float* lse_rows(const ForwardParams& p, const TileCoordinate& c, int row_begin) {
  return p.lse ? p.lse + (static_cast<int64>(c.batch) * p.heads_q + c.head) * p.seqlen_q + row_begin : nullptr;
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
