// The band mask: causal masks of both alignments, windows and the end of the keys are one interval of keys per row.
#pragma once

#include "core/params.cuh"

namespace cuflash {

__device__ __forceinline__ float negative_infinity() {
  return __int_as_float(0xFF800000);
}

// Keys [first, last] that a query row sees.
struct VisibleKeys {
  int first, last;

  template <bool HasBand>
  static __device__ __forceinline__ VisibleKeys of_row(const ForwardParams& p, int row) {
    if constexpr (HasBand) {
      return {row + p.diag_lower, min(row + p.diag_upper, p.seqlen_k - 1)};
    } else {
      return {0, p.seqlen_k - 1};
    }
  }

  __device__ __forceinline__ bool contains(int key) const { return key >= first && key <= last; }
};

// Overwrites the hidden scores of a (16 * MTiles) x (8 * NTiles) fragment with -inf, so that whatever q.k gave there,
// NaN included, is gone. `row` and `column` are those of this thread's element rS[0][0][0].
template <bool HasBand, int MTiles, int NTiles>
__device__ __forceinline__ void mask_scores(float (&rS)[MTiles][NTiles][4], const ForwardParams& p, int row,
                                            int column) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const VisibleKeys keys = VisibleKeys::of_row<HasBand>(p, row + 16 * m + 8 * half);
      const int first = keys.first - column;
      const int last = keys.last - column;
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = 8 * n + c;
          if ((HasBand && key < first) || key > last) rS[m][n][2 * half + c] = negative_infinity();
        }
      }
    }
  }
}

}  // namespace cuflash
