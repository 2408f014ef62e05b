// Inf and NaN in V under a mask. A hidden key has weight 0, but 0 * NaN and 0 * inf are NaN inside the matrix product.
// A block whose output holds one is therefore computed again, carefully: in each tile that needs a mask the inf and NaN
// values are added to the rows that see them, and then replaced by 0 in shared memory before the product.
#pragma once

#include "core/mask.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

// Whether the chunks that this thread copied hold an inf or NaN. Needs only its own copies to have arrived.
template <class Element, class Loader>
__device__ __forceinline__ bool has_nonfinite(const Loader& loader, unsigned sV) {
  unsigned sum = 0;
  loader.for_each_chunk(sV, [&](unsigned address) {
    const uint4 chunk = load_shared_chunk(address);
    sum = add_zero_times<Element>(chunk.x, sum);
    sum = add_zero_times<Element>(chunk.y, sum);
    sum = add_zero_times<Element>(chunk.z, sum);
    sum = add_zero_times<Element>(chunk.w, sum);
  });
  return any_nonfinite<Element>(sum);
}

template <class Element, class Loader>
__device__ __forceinline__ void clear_nonfinite(const Loader& loader, unsigned sV) {
  loader.for_each_chunk(sV, [&](unsigned address) {
    const uint4 chunk = load_shared_chunk(address);
    store_shared(address, make_uint4(finite_or_zero<Element>(chunk.x), finite_or_zero<Element>(chunk.y),
                                     finite_or_zero<Element>(chunk.z), finite_or_zero<Element>(chunk.w)));
  });
}

// A weight is positive, so the sum of a row that sees an inf or NaN becomes that value: no weight is needed.
// `row` is this thread's first row, `side` which of Parts parts of the columns rO covers.
template <bool HasBand, class Element, int Dim, int Parts, int TileN, int MTiles, int DTiles>
__device__ __forceinline__ void add_nonfinite_values(float (&rO)[MTiles][DTiles][4], unsigned sV,
                                                     const ForwardParams& p, int row, int first_key, int side,
                                                     int lane) {
#pragma unroll 1
  for (int key = 0; key < TileN; ++key) {
#pragma unroll
    for (int d = 0; d < DTiles; ++d) {
      const int chunk = TileLayout<Dim>::template part_chunk<Parts>(side, d);
      const unsigned pair = load_shared(sV + TileLayout<Dim>::offset(key, chunk) + 4 * (lane % 4));
      if (!any_nonfinite<Element>(pair)) continue;
      const unsigned only = pair & ~finite_or_zero<Element>(pair);  // the finite half, if any, becomes 0
      const float low = unpack<Element>(static_cast<unsigned short>(only));
      const float high = unpack<Element>(static_cast<unsigned short>(only >> 16));
#pragma unroll
      for (int m = 0; m < MTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!VisibleKeys::of_row<HasBand>(p, row + 16 * m + 8 * half).contains(first_key + key)) continue;
          rO[m][d][2 * half] += low;
          rO[m][d][2 * half + 1] += high;
        }
    }
  }
}

}  // namespace cuflash
