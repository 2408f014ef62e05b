#pragma once

#include "ptx/convert.cuh"

namespace cuflash {

inline unsigned fma_bfloat16_pair(unsigned a, unsigned b, unsigned c) {
  float sum[2];
  for (int i = 0; i < 2; ++i) {
    const auto half = [i](unsigned pair) { return bfloat16_to_float(static_cast<unsigned short>(pair >> 16 * i)); };
    sum[i] = half(a) * half(b) + half(c);
  }
  return bfloat16_pair(sum[0], sum[1]);
}

inline unsigned fma_float16_pair(unsigned a, unsigned b, unsigned c) {
  float sum[2];
  for (int i = 0; i < 2; ++i) {
    const auto half = [i](unsigned pair) { return float16_to_float(static_cast<unsigned short>(pair >> 16 * i)); };
    sum[i] = half(a) * half(b) + half(c);
  }
  return float16_pair(sum[0], sum[1]);
}

}  // namespace cuflash
