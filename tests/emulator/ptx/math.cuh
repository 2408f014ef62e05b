#pragma once

namespace cuflash {

inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float exp2_approx(float x) {
  return flushed(std::exp2(flushed(x)));
}

inline float reciprocal_approx(float x) {
  return 1.0f / x;
}

inline float reciprocal(float x) {
  return 1.0f / x;
}

}  // namespace cuflash
