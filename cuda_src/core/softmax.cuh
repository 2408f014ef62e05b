// Online softmax over key tiles (FlashAttention-2, Dao 2023, section 3.1).
#pragma once

#include "core/mask.cuh"
#include "core/types.cuh"
#include "ptx/math.cuh"

namespace cuflash {

// The reference of a row is its running maximum, raised at every new one and not only when weights would leave their
// range (as FlashAttention-4 does). Whatever the reference, a weight has the same relative precision, except that the
// largest is 1, which 16 bits hold exactly: where one key dominates a row that is most of the error.
//
// exp2(s * scale - reference * scale) is one FFMA a score, with the product for the reference rounded once. Beyond this
// many base-2 units its rounding would show, or overflow; such a row subtracts first, which is exact near the maximum.
constexpr float kMaxFoldedReference = 1048576.0f;

// Whether a reference is too far from 0 to be folded into an FFMA.
__device__ __forceinline__ bool is_far_reference(float reference, float exp2_scale) {
  return fabsf(__fmul_rn(reference, exp2_scale)) > kMaxFoldedReference && reference != negative_infinity();
}

// State of this thread's rows: lane/4 and lane/4 + 8 of each 16-row fragment.
template <int MTiles>
struct OnlineSoftmax {
  float row_max[MTiles][2];  // in staged score units; shared by the four lanes of a row
  float row_sum[MTiles][2];  // this lane's part only, until the kernel combines them

  __device__ __forceinline__ void init() {
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = negative_infinity();
        row_sum[m][half] = 0.0f;
      }
  }

  // Raises the running maximum of a row to that of a tile, the same in all lanes of the row. What the row has
  // accumulated must be multiplied with the factor returned, 1 without a new maximum.
  __device__ __forceinline__ float raise_max(int m, int half, float tile_max, float exp2_scale) {
    const float old = row_max[m][half];
    const bool raise = tile_max > old;  // not for NaN, nor for -inf over -inf
    const float factor = exp2_approx(raise ? (old - tile_max) * exp2_scale : 0.0f);  // a select, no branch
    row_max[m][half] = raise ? tile_max : old;
    row_sum[m][half] *= factor;
    return factor;
  }

  __device__ __forceinline__ bool is_far(int m, int half, float exp2_scale) const {
    return is_far_reference(row_max[m][half], exp2_scale);
  }

  // The scores of a far row relative to its reference; exponentiate() then has nothing to subtract from them.
  template <int NTiles>
  __device__ __forceinline__ void subtract_far_reference(float (&rS)[MTiles][NTiles][4], int m, int half,
                                                         float exp2_scale) const {
    const float reference = is_far(m, half, exp2_scale) ? row_max[m][half] : 0.0f;
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      rS[m][n][2 * half] -= reference;
      rS[m][n][2 * half + 1] -= reference;
    }
  }

  // The scores of a row to weights, in place, and their sum.
  template <int NTiles>
  __device__ __forceinline__ void exponentiate(float (&rS)[MTiles][NTiles][4], int m, int half, float exp2_scale) {
    // A row that has seen no key yet also subtracts 0: exp2(-inf - 0) is the 0 it needs.
    const float folded = __fmul_rn(row_max[m][half], exp2_scale);
    const float shift = fabsf(folded) > kMaxFoldedReference ? 0.0f : folded;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& s = rS[m][n][2 * half + c];
        s = exp2_approx(fmaf(s, exp2_scale, -shift));
        sum += s;
      }
    row_sum[m][half] += sum;
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
};

// Multiplies the rows of O. Lazy: a 16-row fragment only if one of its rows has a factor other than 1.
template <bool Lazy, int MTiles, int DTiles>
__device__ __forceinline__ void rescale(float (&rO)[MTiles][DTiles][4], const float (&factor)[MTiles][2]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
    if (Lazy && !__any_sync(0xFFFFFFFFu, factor[m][0] != 1.0f || factor[m][1] != 1.0f)) continue;
#pragma unroll
    for (int d = 0; d < DTiles; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) rO[m][d][i] *= factor[m][i / 2];
  }
}

// Combines the values of the four lanes of a row with f.
template <class F>
__device__ __forceinline__ float combine_quad(float value, F&& f) {
  value = f(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
  return f(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

// The larger of `start` and the largest of this lane's scores in a row, by way of Chains independent maxima.
template <int Chains = 1, int MTiles, int NTiles>
__device__ __forceinline__ float lane_row_max(const float (&rS)[MTiles][NTiles][4], int m, int half, float start) {
  float chain[Chains];
#pragma unroll
  for (float& largest : chain) largest = start;
#pragma unroll
  for (int i = 0; i < 2 * NTiles; ++i) {
    float& largest = chain[i % Chains];
    largest = fmaxf(largest, rS[m][i / 2][2 * half + i % 2]);
  }
#pragma unroll
  for (int c = 1; c < Chains; ++c) chain[0] = fmaxf(chain[0], chain[c]);
  return chain[0];
}

// The same where `start` is at least +0: then numbers compare as their bits do as signed integers, and of those sm_90
// compares three in one instruction. A NaN may be the result.
template <int MTiles, int NTiles>
__device__ __forceinline__ float lane_row_max_from_zero(const float (&rS)[MTiles][NTiles][4], int m, int half,
                                                        float start) {
  int largest = __float_as_int(start);
#pragma unroll
  for (int n = 0; n < NTiles; ++n)
    largest = max(max(largest, __float_as_int(rS[m][n][2 * half])), __float_as_int(rS[m][n][2 * half + 1]));
  return __int_as_float(largest);
}

}  // namespace cuflash
