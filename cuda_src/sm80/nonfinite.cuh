// Inf and NaN in V under a mask. A hidden key has weight 0, but 0 * NaN is NaN inside the matrix product, so a tile that
// is partly hidden and holds such values takes this rare way: the values are added to the rows that see them, and then
// replaced by 0 in shared memory before the product.
#pragma once

#include "core/mask.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

// Whether the chunks that this thread copied hold an inf or NaN. Needs only its own copies to have arrived.
template <class Element, class Loader>
__device__ __forceinline__ bool has_nonfinite(const Loader& loader, unsigned sV) {
  bool found = false;
  loader.for_each_chunk(sV, [&](unsigned address) {
    unsigned w[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address));
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= any_nonfinite<Element>(w[i]);
  });
  return found;
}

template <class Element, class Loader>
__device__ __noinline__ void clear_nonfinite(const Loader& loader, unsigned sV) {
  loader.for_each_chunk(sV, [&](unsigned address) {
    unsigned w[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address));
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(finite_or_zero<Element>(w[0])),
                 "r"(finite_or_zero<Element>(w[1])), "r"(finite_or_zero<Element>(w[2])), "r"(finite_or_zero<Element>(w[3]))
                 : "memory");
  });
}

// A weight is positive, so the sum of a row that sees an inf or NaN becomes that value: no weight is needed.
// `row` is this thread's first row, `first_chunk` the first 8-column chunk of sV that rO covers.
template <bool HasBand, class Element, int Dim, int TileN, int MTiles, int DTiles>
__device__ __forceinline__ void add_nonfinite_values(float (&rO)[MTiles][DTiles][4], unsigned sV, const ForwardParams& p, int row,
                                                     int first_key, int first_chunk, int lane) {
#pragma unroll 1
  for (int key = 0; key < TileN; ++key) {
#pragma unroll
    for (int d = 0; d < DTiles; ++d) {
      unsigned pair;
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(pair)
                   : "r"(sV + TileLayout<Dim>::offset(key, first_chunk + d) + 4 * (lane % 4)));
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
