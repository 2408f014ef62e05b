#pragma once

#include "ptx/convert.cuh"

namespace cuflash {

template <float Half(unsigned short), unsigned Pair(float, float)>
unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
  float sum[2];
  for (int i = 0; i < 2; ++i) {
    const auto half = [i](unsigned pair) { return Half(static_cast<unsigned short>(pair >> 16 * i)); };
    sum[i] = half(a) * half(b) + half(c);
  }
  return Pair(sum[0], sum[1]);
}

inline unsigned fma_bfloat16_pair(unsigned a, unsigned b, unsigned c) {
  return fma_pair<bfloat16_to_float, bfloat16_pair>(a, b, c);
}

inline unsigned fma_float16_pair(unsigned a, unsigned b, unsigned c) {
  return fma_pair<float16_to_float, float16_pair>(a, b, c);
}

}  // namespace cuflash
