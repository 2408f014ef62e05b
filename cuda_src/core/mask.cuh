// The band mask: causal masks of both alignments, windows and the end of the keys are one interval of keys per row.
#pragma once

#include "core/params.cuh"
#include "ptx/bits.cuh"

namespace cuflash {

__device__ __forceinline__ float negative_infinity() {
  return __int_as_float(0xFF800000);
}

__device__ __forceinline__ bool is_finite(float value) {
  return fabsf(value) < -negative_infinity();
}

// Whether a row has no weight anywhere: it sees no keys, or all its scores are -inf. It adds nothing to any gradient.
__device__ __forceinline__ bool weightless(float lse) {
  return lse == negative_infinity();
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

// How many of this thread's elements of a fragment row, at columns 0, 1, 8, 9, 16, ... relative to the first, lie
// before `column`; at most 0 when it is negative.
__device__ __forceinline__ int elements_before(int column) {
  return 2 * (column >> 3) + min(column & 7, 2);
}

// Scores as a matrix: row i holds column j when lower <= j - i <= upper.
struct ScoreBand {
  int lower, upper, rows, columns;

  static __device__ __forceinline__ ScoreBand of_queries(const ForwardParams& p) {
    return {p.diag_lower, p.diag_upper, p.seqlen_q, p.seqlen_k};
  }

  // Of the transposed matrix, whose rows are keys.
  static __device__ __forceinline__ ScoreBand of_keys(const ForwardParams& p) {
    return {-p.diag_upper, -p.diag_lower, p.seqlen_k, p.seqlen_q};
  }
};

// Calls f(m, n, i) for the hidden elements of a (16 * MTiles) x (8 * NTiles) fragment; `row` and `column` are those of
// this thread's element [0][0][0]. The columns of a row are one bit an element, whose test is cheaper than two
// comparisons; 8 rows further down the band is 2 elements further on. With CheckRows, rows that do not exist see
// nothing.
template <bool HasBand, bool CheckRows, int MTiles, int NTiles, class F>
__device__ __forceinline__ void for_each_hidden(const ScoreBand& band, int row, int column, F&& f) {
  const int begin = HasBand ? elements_before(row + band.lower - column) : 0;
  const int end = HasBand ? elements_before(row + band.upper + 1 - column) : 0;
  const int all = elements_before(band.columns - column);
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int word = 0; word < 2 * NTiles; word += 32) {
        const int further = 4 * m + 2 * half;
        const unsigned before_end = ~bits_from((HasBand ? min(end + further, all) : all) - word);
        unsigned visible = HasBand ? before_end & bits_from(begin + further - word) : before_end;
        if (CheckRows && row + 16 * m + 8 * half >= band.rows) visible = 0;
#pragma unroll
        for (int i = word; i < 2 * NTiles && i < word + 32; ++i)
          if (!(visible >> (i - word) & 1)) f(m, i / 2, 2 * half + i % 2);
      }
}

// Overwrites the hidden scores of a fragment with -inf, so that whatever q.k gave there, NaN included, is gone.
template <bool HasBand, int MTiles, int NTiles>
__device__ __forceinline__ void mask_scores(float (&rS)[MTiles][NTiles][4], const ForwardParams& p, int row,
                                            int column) {
  for_each_hidden<HasBand, false, MTiles, NTiles>(ScoreBand::of_queries(p), row, column,
                                                  [&](int m, int n, int i) { rS[m][n][i] = negative_infinity(); });
}

}  // namespace cuflash
