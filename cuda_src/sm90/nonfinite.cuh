// Inf and NaN in V under a mask, as in sm80/nonfinite.cuh: a hidden key has weight 0, but 0 * NaN is NaN inside the
// matrix product. In each tile that needs a mask such values are looked for, added to the rows that see them, and
// replaced by 0 in shared memory before the product.
#pragma once

#include "core/mask.cuh"
#include "ptx/shared.cuh"
#include "sm90/panel.cuh"

namespace cuflash {

// Whether this thread's part of a tile of Bytes bytes, 1 / Threads of it, holds an inf or NaN.
template <class Element, int Bytes, int Threads>
__device__ __forceinline__ bool holds_nonfinite(unsigned shared, int thread) {
  unsigned sum = 0;
#pragma unroll 4
  for (int at = 16 * thread; at < Bytes; at += 16 * Threads) {
    const uint4 chunk = load_shared_chunk(shared + at);
    sum = add_zero_times<Element>(chunk.x, sum);
    sum = add_zero_times<Element>(chunk.y, sum);
    sum = add_zero_times<Element>(chunk.z, sum);
    sum = add_zero_times<Element>(chunk.w, sum);
  }
  return any_nonfinite<Element>(sum);
}

template <class Element, int Bytes, int Threads>
__device__ __forceinline__ void clear_nonfinite(unsigned shared, int thread) {
#pragma unroll 1
  for (int at = 16 * thread; at < Bytes; at += 16 * Threads) {
    const uint4 chunk = load_shared_chunk(shared + at);
    store_shared(shared + at, make_uint4(finite_or_zero<Element>(chunk.x), finite_or_zero<Element>(chunk.y),
                                         finite_or_zero<Element>(chunk.z), finite_or_zero<Element>(chunk.w)));
  }
}

// A weight is positive, so the sum of a row that sees an inf or NaN becomes that value: no weight is needed. `row` is
// this thread's first row.
template <class Element, class Layout, int TileN, int DBlocks>
__device__ __forceinline__ void add_nonfinite_values(float (&rO)[1][DBlocks][4], unsigned sV, const ForwardParams& p,
                                                     int row, int first_key, int lane) {
#pragma unroll 1
  for (int key = 0; key < TileN; ++key) {
#pragma unroll
    for (int d = 0; d < DBlocks; ++d) {
      const unsigned pair = load_shared(sV + Layout::chunk(key, d) + 4 * (lane % 4));
      if (!any_nonfinite<Element>(pair)) continue;
      const unsigned only = pair & ~finite_or_zero<Element>(pair);  // the finite half, if any, becomes 0
      const float low = unpack<Element>(static_cast<unsigned short>(only));
      const float high = unpack<Element>(static_cast<unsigned short>(only >> 16));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!VisibleKeys::of_row<true>(p, row + 8 * half).contains(first_key + key)) continue;
        rO[0][d][2 * half] += low;
        rO[0][d][2 * half + 1] += high;
      }
    }
  }
}

}  // namespace cuflash
