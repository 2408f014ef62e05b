// Online softmax over key tiles (FlashAttention-2, Dao 2023, section 3.1) with a lazily updated maximum.
#pragma once

#include "core/mask.cuh"
#include "core/types.cuh"
#include "ptx/math.cuh"

namespace cuflash {

// A row keeps a stale maximum until the true one is 2^8 times larger in exp2 units: weights then stay below 2^8,
// nothing overflows, the result is as exact, and most tiles need no rescaling of O. The choice is made row by row, so
// that a row's bits never depend on its neighbours; only the skipping of a multiplication by 1 is decided per warp.
constexpr float kRescaleThreshold = 8.0f;

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

  // Raises the maxima that a tile has outgrown, and rescales what those rows have accumulated.
  template <int DTiles>
  __device__ __forceinline__ void raise_max(const float (&tile_max)[MTiles][2], float (&rO)[MTiles][DTiles][4],
                                            float exp2_scale) {
    bool any = false;
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) any |= outgrown(m, half, tile_max, exp2_scale);
    if (!__any_sync(0xFFFFFFFFu, any)) return;
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool raise = outgrown(m, half, tile_max, exp2_scale);
        const float factor = raise ? exp2_approx((row_max[m][half] - tile_max[m][half]) * exp2_scale) : 1.0f;
        row_max[m][half] = raise ? tile_max[m][half] : row_max[m][half];
        row_sum[m][half] *= factor;
#pragma unroll
        for (int d = 0; d < DTiles; ++d) {
          rO[m][d][2 * half] *= factor;
          rO[m][d][2 * half + 1] *= factor;
        }
      }
  }

  // Scores to weights, in place, adding them to the row sums.
  template <int NTiles>
  __device__ __forceinline__ void exponentiate(float (&rS)[MTiles][NTiles][4], float exp2_scale) {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row that has seen no key yet subtracts 0: exp2(-inf - 0) is the 0 it needs.
        const float shift = row_max[m][half] == negative_infinity() ? 0.0f : __fmul_rn(row_max[m][half], exp2_scale);
#pragma unroll
        for (int n = 0; n < NTiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& s = rS[m][n][2 * half + c];
            s = exp2_approx(fmaf(s, exp2_scale, -shift));
            row_sum[m][half] += s;
          }
      }
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
    // The product rounded as exponentiate() rounded it: the sum is relative to that.
    return __fadd_rn(__fmul_rn(row_max[m][half], exp2_scale), log2f(row_sum[m][half])) * ln2;
  }

 private:
  // Whether a tile's maximum is out of reach of the row's. False for NaN and for -inf against -inf.
  __device__ __forceinline__ bool outgrown(int m, int half, const float (&tile_max)[MTiles][2],
                                           float exp2_scale) const {
    return (tile_max[m][half] - row_max[m][half]) * exp2_scale > kRescaleThreshold;
  }
};

template <int MTiles, int NTiles>
__device__ __forceinline__ void tile_row_max(const float (&rS)[MTiles][NTiles][4], float (&tile_max)[MTiles][2]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = fmaxf(rS[m][0][2 * half], rS[m][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < NTiles; ++n) best = fmaxf(best, fmaxf(rS[m][n][2 * half], rS[m][n][2 * half + 1]));
      best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 1));
      tile_max[m][half] = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
    }
}

}  // namespace cuflash
