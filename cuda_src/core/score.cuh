// Score stages: what happens to q.k before masks and softmax. The identity compiles to nothing.
#pragma once

#include "core/params.cuh"
#include "ptx/math.cuh"

namespace cuflash {

// The scale is folded into the exponent (exp2_scale = scale * log2 e); needs scale > 0 so that maxima stay maxima.
struct score_folded {
  static __device__ __forceinline__ float apply(float s, const ForwardParams&) { return s; }
};

// Any sign of scale, 0 too.
struct score_scaled {
  static __device__ __forceinline__ float apply(float s, const ForwardParams& p) { return s * p.score_scale; }
};

// softcap * tanh(scale * s / softcap), with score_scale = 2 log2(e) scale / softcap. tanh x = 1 - 2 / (1 + e^2x) is exact to
// about 1e-7, where tanh.approx is off by 2^-11: times a cap of 50 that would be larger than a bfloat16 rounding of P.
struct score_softcap {
  static __device__ __forceinline__ float apply(float s, const ForwardParams& p) {
    const float e = exp2_approx(s * p.score_scale);
    return p.softcap - 2.0f * p.softcap * reciprocal_approx(1.0f + e);
  }
};

template <class Score, int MTiles, int NTiles>
__device__ __forceinline__ void stage_scores(float (&rS)[MTiles][NTiles][4], const ForwardParams& p) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) rS[m][n][i] = Score::apply(rS[m][n][i], p);
}

}  // namespace cuflash
