// csrc/device/pack.cuh for the host: what csrc/device/functions.cuh, which is the real one, needs of it and of CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "device/types.cuh"

#define __device__
#define __forceinline__ inline
#define asm(...) inverse = 1.0f / denominator  // the only instruction there: rcp.approx, in tanh

namespace jax_softmax::device {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float min_or_nan(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }

// An element of 16 bits.
template <class T>
struct Bits;
template <>
struct Bits<BFloat16> {
  static float widen(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
  static uint16_t narrow(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  }
};
template <>
struct Bits<Float16> {
  static float widen(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : ldexpf(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -size : size;
  }
  static uint16_t narrow(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = fabsf(x);
    if (size != size) return 0x7e00;
    if (size >= 65520) return sign | 0x7c00;  // halfway between the largest number and the next
    if (size < 0x1p-14f) return sign | static_cast<int>(nearbyintf(size * 0x1p24f));
    int exponent;
    const float fraction = frexpf(size, &exponent);  // 0.5 to 1
    return sign | (((exponent + 13) << 10) + static_cast<int>(nearbyintf(fraction * 2048)));  // 1024 is the first bit
  }
};

template <class T>
struct Pair {
  static void widen(float& low, float& high, uint32_t word) {
    low = Bits<T>::widen(word & 0xffff);
    high = Bits<T>::widen(word >> 16);
  }
  static uint32_t narrow(float low, float high) {
    return Bits<T>::narrow(low) | static_cast<uint32_t>(Bits<T>::narrow(high)) << 16;
  }
};

}  // namespace jax_softmax::device
