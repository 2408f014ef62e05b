// Score stages: what happens to q.k before masks and softmax. The identity compiles to nothing. The form of apply with
// `slope` is for the backward pass, and also gives the derivative of the staged score by scale * q.k; it is 1
// everywhere unless the stage bends scores.
#pragma once

#include "core/params.cuh"
#include "ptx/math.cuh"

namespace cuflash {

__device__ __forceinline__ void constant_slope(float (&slope)[4]) {
#pragma unroll
  for (float& x : slope) x = 1.0f;
}

// The scale is folded into the exponent (exp2_scale = scale * log2 e); needs scale > 0 so that maxima stay maxima.
struct score_folded {
  static constexpr bool bends = false;

  static __device__ __forceinline__ void apply(float (&)[4], const ForwardParams&) {}

  static __device__ __forceinline__ void apply(float (&)[4], float (&slope)[4], const ForwardParams&) {
    constant_slope(slope);
  }
};

// Any sign of scale, 0 too.
struct score_scaled {
  static constexpr bool bends = false;

  static __device__ __forceinline__ void apply(float (&s)[4], const ForwardParams& p) {
#pragma unroll
    for (float& x : s) x *= p.score_scale;
  }

  static __device__ __forceinline__ void apply(float (&s)[4], float (&slope)[4], const ForwardParams& p) {
    apply(s, p);
    constant_slope(slope);
  }
};

// tanh of four numbers to a few float32 roundings at every size. tanh.approx is off by 2^-11, which a cap of 50 would
// make larger than the rounding of P to bfloat16; and the exponential form alone loses relative accuracy near 0, where
// a large cap works. The warp votes on whether any of its numbers needs the series, which also keeps the compiler from
// computing all of a tile at once, in more registers than there are.
__device__ __forceinline__ void accurate_tanh(float (&x)[4]) {
  constexpr float minus_two_log2_e = -2.8853900817779268f;
  float far[4];
  bool any_near = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float e = exp2_approx(minus_two_log2_e * fabsf(x[i]));
    far[i] = copysignf((1.0f - e) * reciprocal_approx(1.0f + e), x[i]);
    any_near |= fabsf(x[i]) < 0.25f;
  }
  if (__any_sync(0xFFFFFFFFu, any_near)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x2 = x[i] * x[i];  // Taylor series to x^9
      const float series = fmaf(fmaf(fmaf(62.0f / 2835.0f, x2, -17.0f / 315.0f), x2, 2.0f / 15.0f), x2, -1.0f / 3.0f);
      if (fabsf(x[i]) < 0.25f) far[i] = fmaf(series * x2, x[i], x[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = far[i];
}

// softcap * tanh(scale * s / softcap), with score_scale = scale / softcap.
struct score_softcap {
  static constexpr bool bends = true;

  static __device__ __forceinline__ void apply(float (&s)[4], const ForwardParams& p) {
#pragma unroll
    for (float& x : s) x *= p.score_scale;
    accurate_tanh(s);
#pragma unroll
    for (float& x : s) x *= p.softcap;
  }

  // The slope is 1 - tanh^2.
  static __device__ __forceinline__ void apply(float (&s)[4], float (&slope)[4], const ForwardParams& p) {
#pragma unroll
    for (float& x : s) x *= p.score_scale;
    accurate_tanh(s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      slope[i] = fmaf(-s[i], s[i], 1.0f);
      s[i] *= p.softcap;
    }
  }
};

template <class Score, int MTiles, int NTiles>
__device__ __forceinline__ void stage_scores(float (&rS)[MTiles][NTiles][4], const ForwardParams& p) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int n = 0; n < NTiles; ++n) Score::apply(rS[m][n], p);
}

}  // namespace cuflash
