// Which key tiles a query tile visits, which query tiles a key tile visits, and which pairs of tiles need a mask.
#pragma once

#include "core/params.cuh"

namespace cuflash {

struct TileRange {
  int first, last;

  __device__ __forceinline__ bool contains(int tile) const { return tile >= first && tile < last; }
};

// Key tiles [first, last) of TileN keys for query rows [row_begin, row_end). Tiles start at multiples of TileN from
// key 0, whatever the query tile, so that a row's sums group the same way in every problem.
struct KeyTiles : TileRange {
  template <bool HasBand, int TileN>
  static __device__ __forceinline__ KeyTiles make(const ForwardParams& p, int row_begin, int row_end) {
    if constexpr (HasBand) {
      const int first_key = max(row_begin + p.diag_lower, 0);
      const int last_key = min(row_end - 1 + p.diag_upper, p.seqlen_k - 1);
      return {first_key / TileN, last_key < 0 ? 0 : last_key / TileN + 1};
    } else {
      return {0, (p.seqlen_k + TileN - 1) / TileN};
    }
  }

  // Those of them that all rows of [row_begin, row_begin + TileM) see in full.
  template <bool HasBand, int TileM, int TileN>
  static __device__ __forceinline__ KeyTiles without_mask(const ForwardParams& p, int row_begin) {
    if constexpr (HasBand) {
      const int first_key = max(row_begin + TileM - 1 + p.diag_lower, 0);
      const int end_key = max(min(row_begin + p.diag_upper + 1, p.seqlen_k), 0);
      return {(first_key + TileN - 1) / TileN, end_key / TileN};
    } else {
      return {0, p.seqlen_k / TileN};
    }
  }
};

// Query tiles [first, last) of TileM rows for keys [key_begin, key_end). Empty when none of their rows sees a key.
struct QueryTiles : TileRange {
  template <bool HasBand, int TileM>
  static __device__ __forceinline__ QueryTiles make(const ForwardParams& p, int key_begin, int key_end) {
    if constexpr (HasBand) {
      const int first_row = max(key_begin - p.diag_upper, 0);
      const int last_row = min(key_end - 1 - p.diag_lower, p.seqlen_q - 1);
      return {first_row / TileM, last_row < first_row ? first_row / TileM : last_row / TileM + 1};
    } else {
      return {0, (p.seqlen_q + TileM - 1) / TileM};
    }
  }

  // Those of which each row, whether it exists or not, sees all keys of a tile of TileN.
  template <bool HasBand, int TileM, int TileN>
  static __device__ __forceinline__ QueryTiles without_mask(const ForwardParams& p, int key_tile) {
    const int first_key = key_tile * TileN, last_key = first_key + TileN - 1;
    if (last_key >= p.seqlen_k) return {0, 0};
    if constexpr (!HasBand) return {0, (p.seqlen_q + TileM - 1) / TileM};
    const int first_row = max(last_key - p.diag_upper, 0), last_row = first_key - p.diag_lower - (TileM - 1);
    return {(first_row + TileM - 1) / TileM, last_row < 0 ? 0 : last_row / TileM + 1};
  }
};

// Whether a key tile holds a key that some row of [row_begin, row_begin + TileM) does not see.
template <bool HasBand, int TileM, int TileN>
__device__ __forceinline__ bool needs_mask(const ForwardParams& p, int row_begin, int tile) {
  const int first_key = tile * TileN, last_key = first_key + TileN - 1;
  if (last_key >= p.seqlen_k) return true;
  return HasBand && (last_key > row_begin + p.diag_upper || first_key < row_begin + TileM - 1 + p.diag_lower);
}

}  // namespace cuflash
