// Online softmax over key tiles (FlashAttention-2, Dao 2023, section 3.1) without a maximum of every tile.
#pragma once

#include "core/mask.cuh"
#include "core/types.cuh"
#include "ptx/math.cuh"

namespace cuflash {

// The maximum only keeps the weights in range; any reference does that in exact arithmetic. So a row takes the maximum
// of the first tile where it sees a key, and later tiles are weighed against that without looking for theirs. Their sum
// of weights, needed anyway, tells when the reference has become too low: it is then more than kMaxTileSum, the tile is
// weighed again after raising the row's reference to the tile's maximum, and what the row has accumulated is rescaled.
// That is rare, so tiles have no maxima, no shuffles and no rescaling on their way, and exponentials start as soon as
// the first scores are there. A row decides by its own scores alone, so its bits do not depend on its neighbours. The
// bound leaves room in float16 (65504) for the weights; relative precision does not depend on the reference.
constexpr float kMaxTileSum = 16384.0f;

// exp2(s * scale - reference * scale) is one FFMA a score, with the product for the reference rounded once. Beyond this
// many base-2 units its rounding would show, or overflow; such a row subtracts first, which is exact near the maximum.
constexpr float kMaxFoldedReference = 1048576.0f;

// State of this thread's rows: lane/4 and lane/4 + 8 of each 16-row fragment.
template <int MTiles>
struct OnlineSoftmax {
  float row_max[MTiles][2];  // in staged score units; shared by the four lanes of a row
  float row_sum[MTiles][2];  // this lane's part only, until finish()

  __device__ __forceinline__ void init() {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = negative_infinity();
        row_sum[m][half] = 0.0f;
      }
  }

  // Bit 2 * m + half for each of this thread's rows that has no maximum yet.
  __device__ __forceinline__ unsigned rows_without_max() const {
    unsigned rows = 0;
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows |= (row_max[m][half] == negative_infinity() ? 1u : 0u) << (2 * m + half);
    return rows;
  }

  // Raises the maxima of some rows to those of a tile, and rescales what the rows have accumulated.
  template <int DTiles>
  __device__ __forceinline__ void raise_max(unsigned rows, const float (&tile_max)[MTiles][2],
                                            float (&rO)[MTiles][DTiles][4], float exp2_scale) {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = row_max[m][half], now = tile_max[m][half];
        const bool raise = (rows >> (2 * m + half) & 1) && now > old;  // not for NaN, nor for -inf over -inf
        const float factor = raise ? exp2_approx((old - now) * exp2_scale) : 1.0f;
        row_max[m][half] = raise ? now : old;
        row_sum[m][half] *= factor;
#pragma unroll
        for (int d = 0; d < DTiles; ++d) {
          rO[m][d][2 * half] *= factor;
          rO[m][d][2 * half + 1] *= factor;
        }
      }
  }

  // Whether the reference of some row of the warp is too far from 0 to be folded into an FFMA. Only raise_max() changes
  // the answer.
  __device__ __forceinline__ bool any_far(float exp2_scale) const {
    bool far = false;
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) far |= is_far(m, half, exp2_scale);
    return __any_sync(0xFFFFFFFFu, far);
  }

  // The scores of far rows relative to their reference; exponentiate() then has nothing to subtract from them.
  template <int NTiles>
  __device__ __forceinline__ void subtract_far_references(float (&rS)[MTiles][NTiles][4], float exp2_scale) const {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = is_far(m, half, exp2_scale) ? row_max[m][half] : 0.0f;
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {
          rS[m][n][2 * half] -= reference;
          rS[m][n][2 * half + 1] -= reference;
        }
      }
  }

  // Scores to weights, in place, and this lane's part of their sums.
  template <int NTiles>
  __device__ __forceinline__ void exponentiate(float (&rS)[MTiles][NTiles][4], float (&tile_sum)[MTiles][2],
                                               float exp2_scale) const {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row that has seen no key yet also subtracts 0: exp2(-inf - 0) is the 0 it needs.
        const float folded = __fmul_rn(row_max[m][half], exp2_scale);
        const float shift = fabsf(folded) > kMaxFoldedReference ? 0.0f : folded;
        tile_sum[m][half] = 0.0f;
#pragma unroll
        for (int n = 0; n < NTiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& s = rS[m][n][2 * half + c];
            s = exp2_approx(fmaf(s, exp2_scale, -shift));
            tile_sum[m][half] += s;
          }
      }
  }

  __device__ __forceinline__ void add(const float (&tile_sum)[MTiles][2]) {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[m][half] += tile_sum[m][half];
  }

  // Adds up the four lanes of each row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = row_sum[m][half];
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        row_sum[m][half] = sum;
      }
  }

  // 1/sum, or 0 for a row without keys; NaN stays NaN.
  __device__ __forceinline__ float inverse_sum(int m, int half) const {
    return row_sum[m][half] == 0.0f ? 0.0f : reciprocal(row_sum[m][half]);
  }

  // Natural-log log-sum-exp; -inf for a row without keys.
  __device__ __forceinline__ float lse(int m, int half, float exp2_scale) const {
    constexpr float ln2 = 0.693147180559945309f;
    if (row_sum[m][half] == 0.0f) return negative_infinity();
    const float log2_sum = log2f(row_sum[m][half]);
    if (is_far(m, half, exp2_scale)) return fmaf(row_max[m][half], exp2_scale * ln2, log2_sum * ln2);
    // The product rounded as exponentiate() rounded it: the sum is relative to that.
    return __fadd_rn(__fmul_rn(row_max[m][half], exp2_scale), log2_sum) * ln2;
  }

 private:
  __device__ __forceinline__ bool is_far(int m, int half, float exp2_scale) const {
    return fabsf(__fmul_rn(row_max[m][half], exp2_scale)) > kMaxFoldedReference &&
           row_max[m][half] != negative_infinity();
  }
};

// Rows, as bits 2 * m + half, whose weights in a tile are too large; given each lane's sums, or the largest of a row's.
template <int MTiles>
__device__ __forceinline__ unsigned heavy_rows(const float (&tile_sum)[MTiles][2]) {
  unsigned rows = 0;
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) rows |= (tile_sum[m][half] > kMaxTileSum ? 1u : 0u) << (2 * m + half);
  return rows;
}

// The largest of the four lanes of each row.
template <int MTiles>
__device__ __forceinline__ void quad_max(float (&value)[MTiles][2]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float best = fmaxf(value[m][half], __shfl_xor_sync(0xFFFFFFFFu, value[m][half], 1));
      value[m][half] = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
    }
}

// The largest of this lane's scores in each row.
template <int MTiles, int NTiles>
__device__ __forceinline__ void lane_row_max(const float (&rS)[MTiles][NTiles][4], float (&tile_max)[MTiles][2]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = fmaxf(rS[m][0][2 * half], rS[m][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < NTiles; ++n) best = fmaxf(best, fmaxf(rS[m][n][2 * half], rS[m][n][2 * half + 1]));
      tile_max[m][half] = best;
    }
}

}  // namespace cuflash
