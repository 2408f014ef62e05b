// Element types as tags, and the conversions between two floats and one packed pair.
#pragma once

#include "ptx/convert.cuh"

namespace cuflash {

using int64 = long long;
using uint64 = unsigned long long;

struct bfloat16 {
  static constexpr unsigned exponent_mask = 0x7F807F80u;
};

struct float16 {
  static constexpr unsigned exponent_mask = 0x7C007C00u;
};

template <class Element>
__device__ __forceinline__ unsigned pack(float low, float high);

template <>
__device__ __forceinline__ unsigned pack<bfloat16>(float low, float high) {
  return pack_bfloat16(low, high);
}

template <>
__device__ __forceinline__ unsigned pack<float16>(float low, float high) {
  return pack_float16(low, high);
}

template <class Element>
__device__ __forceinline__ float unpack(unsigned short bits);

template <>
__device__ __forceinline__ float unpack<bfloat16>(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

template <>
__device__ __forceinline__ float unpack<float16>(unsigned short bits) {
  return unpack_float16(bits);
}

// sum + 0 * pair in both halves: stays 0 while every pair is finite, is NaN from the first inf or NaN on.
template <class Element>
__device__ __forceinline__ unsigned add_zero_times(unsigned pair, unsigned sum);

template <>
__device__ __forceinline__ unsigned add_zero_times<bfloat16>(unsigned pair, unsigned sum) {
  return fma_bfloat16(pair, 0u, sum);
}

template <>
__device__ __forceinline__ unsigned add_zero_times<float16>(unsigned pair, unsigned sum) {
  return fma_float16(pair, 0u, sum);
}

// Whether either half of a packed pair is inf or NaN (its exponent bits are all ones).
template <class Element>
__device__ __forceinline__ bool any_nonfinite(unsigned packed) {
  constexpr unsigned mask = Element::exponent_mask;
  return (packed & mask & 0xFFFFu) == (mask & 0xFFFFu) || (packed & mask & 0xFFFF0000u) == (mask & 0xFFFF0000u);
}

// The pair with inf and NaN halves replaced by 0.
template <class Element>
__device__ __forceinline__ unsigned finite_or_zero(unsigned packed) {
  constexpr unsigned mask = Element::exponent_mask;
  if ((packed & mask & 0xFFFFu) == (mask & 0xFFFFu)) packed &= 0xFFFF0000u;
  if ((packed & mask & 0xFFFF0000u) == (mask & 0xFFFF0000u)) packed &= 0xFFFFu;
  return packed;
}

}  // namespace cuflash
