// Writing a finished output tile straight from the accumulators.
#pragma once

#include "core/epilogue.cuh"

namespace cuflash {

// Transposes a 4 x 4 matrix of words over the four lanes of a quad: lane i ends with word i of lanes 0 to 3.
__device__ __forceinline__ uint4 transpose_quad(unsigned w0, unsigned w1, unsigned w2, unsigned w3, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const unsigned a = __shfl_xor_sync(0xFFFFFFFFu, odd ? w0 : w1, 1), b = __shfl_xor_sync(0xFFFFFFFFu, odd ? w2 : w3, 1);
  // Now an even lane holds words 0 and 2 of itself and its neighbour, an odd one words 1 and 3.
  const unsigned x0 = odd ? a : w0, x1 = odd ? w1 : a, x2 = odd ? b : w2, x3 = odd ? w3 : b;
  const unsigned c = __shfl_xor_sync(0xFFFFFFFFu, upper ? x0 : x2, 2);
  const unsigned d = __shfl_xor_sync(0xFFFFFFFFu, upper ? x1 : x3, 2);
  return upper ? make_uint4(c, d, x2, x3) : make_uint4(x0, x1, c, d);
}

// A warp's 16 rows of a result, times factor(half) and rounded: each quad writes 64 bytes of a row at a time. `row` is
// this thread's first row, `rows_left` the rows from row 0 on that exist. Stores are of VectorBytes.
template <class Element, int VectorBytes, bool ExactDim, int DBlocks, class Factor>
__device__ __forceinline__ void store_rows(const float (&rO)[1][DBlocks][4], Factor&& factor, char* gO,
                                           int64 row_stride, int row, int rows_left, int head_dim, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float times = factor(half);
    const bool exists = row + 8 * half < rows_left;
    char* target = gO + (row + 8 * half) * row_stride;
#pragma unroll
    for (int d = 0; d < DBlocks; d += 4) {
      unsigned word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word[i] = pack<Element>(rO[0][d + i][2 * half] * times, rO[0][d + i][2 * half + 1] * times);
      const uint4 data = transpose_quad(word[0], word[1], word[2], word[3], lane);
      const int chunk = d + lane % 4;
      if (exists) store_chunk<VectorBytes>(target + 16 * chunk, data, ExactDim ? 8 : head_dim - 8 * chunk);
    }
  }
}

}  // namespace cuflash
