// Which key tiles a query tile visits, and which of them need a mask.
#pragma once

#include "core/params.cuh"

namespace cuflash {

__device__ __forceinline__ int clamp_min(int x, int lo) { return x < lo ? lo : x; }
__device__ __forceinline__ int clamp_max(int x, int hi) { return x > hi ? hi : x; }

// Key tiles [first, last) of TileN keys for query rows [row_begin, row_end). Tiles start at multiples of TileN from
// key 0, whatever the query tile, so that a row's sums group the same way in every problem.
struct KeyTiles {
  int first, last;
  int unmasked_begin, unmasked_end;  // tiles in [unmasked_begin, unmasked_end) are visible to every row

  template <bool HasBand, int TileN>
  static __device__ __forceinline__ KeyTiles make(const ForwardParams& p, int row_begin, int row_end) {
    KeyTiles t;
    t.first = 0;
    t.last = (p.seqlen_k + TileN - 1) / TileN;
    t.unmasked_begin = 0;
    t.unmasked_end = p.seqlen_k / TileN;
    if constexpr (HasBand) {
      const int last_key = clamp_max(row_end - 1 + p.diag_upper, p.seqlen_k - 1);
      const int first_key = clamp_min(row_begin + p.diag_lower, 0);
      t.last = last_key < 0 ? 0 : last_key / TileN + 1;
      t.first = first_key / TileN;
      const int common_end = clamp_min(row_begin + p.diag_upper + 1, 0);  // keys below it pass the upper bound in every row
      t.unmasked_end = clamp_max(t.unmasked_end, common_end / TileN);
      const int common_begin = clamp_min(row_end - 1 + p.diag_lower, 0);
      t.unmasked_begin = (common_begin + TileN - 1) / TileN;
    }
    return t;
  }

  __device__ __forceinline__ bool needs_mask(int tile) const { return tile >= unmasked_end || tile < unmasked_begin; }
};

}  // namespace cuflash
