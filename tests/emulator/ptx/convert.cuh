#pragma once

namespace cuflash {

inline unsigned short bfloat16_bits(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return 0x7FFF;
  return static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline unsigned short float16_bits(float x) {
  return emulated_bits<unsigned short>(static_cast<_Float16>(x));
}

inline unsigned bfloat16_pair(float low, float high) {
  return bfloat16_bits(low) | static_cast<unsigned>(bfloat16_bits(high)) << 16;
}

inline unsigned float16_pair(float low, float high) {
  return float16_bits(low) | static_cast<unsigned>(float16_bits(high)) << 16;
}

inline float float16_to_float(unsigned short bits) {
  return static_cast<float>(emulated_bits<_Float16>(bits));
}

inline float bfloat16_to_float(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

}  // namespace cuflash
