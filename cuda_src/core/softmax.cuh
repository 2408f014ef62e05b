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
// exp2(s * scale - maximum * scale) is one FFMA a score, with the product for the maximum rounded once: the shift of
// the row. What was summed relative to an old maximum is rescaled by the difference of the shifts. Beyond this many
// base-2 units a shift's rounding would show, or overflow; such a far row subtracts the maximum first, which is exact
// near it.
constexpr float kMaxShift = 1048576.0f;

// Weights are exp2((s - score) * scale - shift).
struct Reference {
  float score, shift;

  static __device__ __forceinline__ float shift_of(float maximum, float exp2_scale) {
    return __fmul_rn(maximum, exp2_scale);
  }

  // Whether a row is far, or has seen no key yet: then shift_of() does not do.
  static __device__ __forceinline__ bool needs_care(float maximum, float exp2_scale) {
    return fabsf(shift_of(maximum, exp2_scale)) > kMaxShift;
  }

  // Of any row. One without keys also subtracts 0: exp2(-inf - 0) is the 0 it needs.
  static __device__ __forceinline__ Reference of(float maximum, float exp2_scale) {
    const bool care = needs_care(maximum, exp2_scale);  // selects, no branches
    return {care && maximum != negative_infinity() ? maximum : 0.0f, care ? 0.0f : shift_of(maximum, exp2_scale)};
  }

  // What a row has accumulated must be multiplied with this when its maximum rises from `old` to `maximum`; 1 when it
  // does not. With Care for any row, else for those that need none.
  template <bool Care>
  static __device__ __forceinline__ float factor(float old, float maximum, float exp2_scale) {
    if constexpr (!Care) return exp2_approx(shift_of(old, exp2_scale) - shift_of(maximum, exp2_scale));
    const Reference was = of(old, exp2_scale), is = of(maximum, exp2_scale);
    const bool same = old == maximum || old == negative_infinity();  // also where inf is, or nothing was summed
    return exp2_approx(same ? 0.0f : fmaf(was.score - is.score, exp2_scale, was.shift - is.shift));
  }
};

// State of this thread's rows: lane/4 and lane/4 + 8 of each 16-row fragment.
template <int MTiles>
struct OnlineSoftmax {
  float row_max[MTiles][2];  // in staged score units; shared by the four lanes of a row
  float row_sum[MTiles][2];  // this lane's part only, until the kernel combines them
  float care_above;          // shifts beyond this need care; -1 while the maximum of one of the warp's rows is far

  __device__ __forceinline__ void init() {
    care_above = kMaxShift;
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = negative_infinity();
        row_sum[m][half] = 0.0f;
      }
  }

  // Whether raising a row to `maximum` needs care, for its own sake or that of another row of the warp.
  __device__ __forceinline__ bool needs_care(float maximum, float exp2_scale) const {
    return fabsf(Reference::shift_of(maximum, exp2_scale)) > care_above;
  }

  // By the whole warp, after care was taken.
  __device__ __forceinline__ void remember_far_rows(float exp2_scale) {
    bool far = false;
#pragma unroll
    for (int m = 0; m < MTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) far |= Reference::of(row_max[m][half], exp2_scale).score != 0.0f;
    care_above = __any_sync(0xFFFFFFFFu, far) ? -1.0f : kMaxShift;
  }

  // The scores of a far row relative to its maximum; exponentiate() then has only the shift to subtract.
  template <int NTiles>
  __device__ __forceinline__ void subtract_far_maximum(float (&rS)[MTiles][NTiles][4], int m, int half,
                                                       float exp2_scale) const {
    const float score = Reference::of(row_max[m][half], exp2_scale).score;
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      rS[m][n][2 * half] -= score;
      rS[m][n][2 * half + 1] -= score;
    }
  }

  // The scores of a row to weights, in place; their sum joins `factor` times the row's.
  template <int NTiles>
  __device__ __forceinline__ void exponentiate(float (&rS)[MTiles][NTiles][4], int m, int half, float exp2_scale,
                                               float shift, float factor) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& s = rS[m][n][2 * half + c];
        s = exp2_approx(fmaf(s, exp2_scale, -shift));
        sum += s;
      }
    row_sum[m][half] = fmaf(row_sum[m][half], factor, sum);
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
    const Reference reference = Reference::of(row_max[m][half], exp2_scale);
    if (reference.score != 0.0f) return fmaf(reference.score, exp2_scale * ln2, log2_sum * ln2);
    return __fadd_rn(reference.shift, log2_sum) * ln2;
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

// The larger of `start` and the largest of this lane's scores in a row.
template <int MTiles, int NTiles>
__device__ __forceinline__ float lane_row_max(const float (&rS)[MTiles][NTiles][4], int m, int half, float start) {
  float largest = start;
#pragma unroll
  for (int n = 0; n < NTiles; ++n) largest = fmaxf(fmaxf(largest, rS[m][n][2 * half]), rS[m][n][2 * half + 1]);
  return largest;
}

}  // namespace cuflash
