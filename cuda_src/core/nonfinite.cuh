// Inf and NaN in V under a mask. A hidden key has weight 0, but 0 * NaN and 0 * inf are NaN inside the matrix product.
// So in a tile that needs a mask the inf and NaN values are added to the rows that see them, and then replaced by 0 in
// shared memory before the product.
#pragma once

#include "core/mask.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// `sum` (see add_zero_times) over one 16-byte chunk in shared memory.
template <class Element>
__device__ __forceinline__ unsigned add_zero_times_chunk(unsigned address, unsigned sum) {
  const uint4 chunk = load_shared_chunk(address);
  sum = add_zero_times<Element>(chunk.x, sum);
  sum = add_zero_times<Element>(chunk.y, sum);
  sum = add_zero_times<Element>(chunk.z, sum);
  return add_zero_times<Element>(chunk.w, sum);
}

// Replaces the inf and NaN values of one chunk by 0.
template <class Element>
__device__ __forceinline__ void clear_nonfinite_chunk(unsigned address) {
  const uint4 chunk = load_shared_chunk(address);
  store_shared(address, make_uint4(finite_or_zero<Element>(chunk.x), finite_or_zero<Element>(chunk.y),
                                   finite_or_zero<Element>(chunk.z), finite_or_zero<Element>(chunk.w)));
}

// Two packed numbers, of which a finite one becomes 0.
template <class Element>
__device__ __forceinline__ float2 unpack_nonfinite(unsigned pair) {
  const unsigned only = pair & ~finite_or_zero<Element>(pair);
  return {unpack<Element>(static_cast<unsigned short>(only)), unpack<Element>(static_cast<unsigned short>(only >> 16))};
}

// A weight is positive, so the sum of a row that sees an inf or NaN becomes that value: no weight is needed.
// `row` is this thread's first row; address(key, d) is where its pair of rO[m][d] stands in the tile's row `key`.
template <bool HasBand, class Element, int TileN, int MTiles, int DTiles, class Address>
__device__ __forceinline__ void add_nonfinite_values(float (&rO)[MTiles][DTiles][4], const ForwardParams& p, int row,
                                                     int first_key, Address&& address) {
#pragma unroll 1
  for (int key = 0; key < TileN; ++key) {
#pragma unroll
    for (int d = 0; d < DTiles; ++d) {
      const unsigned pair = load_shared(address(key, d));
      if (!any_nonfinite<Element>(pair)) continue;
      const float2 only = unpack_nonfinite<Element>(pair);
#pragma unroll
      for (int m = 0; m < MTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!VisibleKeys::of_row<HasBand>(p, row + 16 * m + 8 * half).contains(first_key + key)) continue;
          rO[m][d][2 * half] += only.x;
          rO[m][d][2 * half + 1] += only.y;
        }
    }
  }
}

// In the backward pass: P and dS are 0 for a hidden pair, but 0 * NaN is NaN inside the matrix products. So they
// multiply what is finite, and this adds the rest: acc (row, column) += sum of a(k, row) * b(k, column) over the inf
// and NaN of b at those k in [0, Count) that visible(k, m, half) names. a gives one number, b a packed pair of
// neighbouring columns.
template <class Element, int Count, int MTiles, int NTiles, class Visible, class A, class B>
__device__ __forceinline__ void add_visible_nonfinite(float (&acc)[MTiles][NTiles][4], Visible&& visible, A&& a,
                                                      B&& b) {
#pragma unroll 1
  for (int k = 0; k < Count; ++k) {
    float weight[MTiles][2];
    bool seen[MTiles][2];
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        seen[m][half] = visible(k, m, half);
        weight[m][half] = a(k, m, half);
      }
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      const unsigned pair = b(k, n);
      if (!any_nonfinite<Element>(pair)) continue;
      const float2 only = unpack_nonfinite<Element>(pair);
#pragma unroll
      for (int m = 0; m < MTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!seen[m][half]) continue;
          acc[m][n][2 * half] = fmaf(weight[m][half], only.x, acc[m][n][2 * half]);
          acc[m][n][2 * half + 1] = fmaf(weight[m][half], only.y, acc[m][n][2 * half + 1]);
        }
    }
  }
}

}  // namespace cuflash
