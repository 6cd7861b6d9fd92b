// float8 to and from float32 by integer instructions: chips older than Ada have none for conversions.
#pragma once

#include <cstdint>

namespace jax_softmax::device {

// A float of 8 bits with kMantissa bits of mantissa. kInfinite is the byte after the largest finite number's: infinity,
// or NaN if the type has no infinity.
template <int kMantissa, uint32_t kInfinite>
struct Float8 {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kBias = 128 - (1u << (6 - kMantissa));  // float32's bias less this type's
  static constexpr uint32_t kSmallestNormal = (kBias + 1) << 23;
  // A float32 whose unit in the last place is the smallest subnormal.
  static constexpr uint32_t kSubnormals = (kBias + 24 - kMantissa) << 23;

  static __device__ __forceinline__ float widen(uint32_t byte) {
    const uint32_t magnitude = byte & 0x7fu, moved = magnitude << kShift;
    const uint32_t normal = moved + (kBias << 23);
    const uint32_t subnormal =
        __float_as_uint(__uint_as_float(moved + kSmallestNormal) - __uint_as_float(kSmallestNormal));
    const uint32_t finite = moved < (1u << 23) ? subnormal : normal;
    const uint32_t bits = magnitude < kInfinite ? finite : moved | 0x7f800000u;
    return __uint_as_float(bits | ((byte & 0x80u) << 24));
  }

  // To nearest, ties to even, of numbers within the range or NaN.
  static __device__ __forceinline__ uint32_t narrow(float value) {
    const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    const uint32_t rounding = ((magnitude >> kShift) & 1u) + ((1u << (kShift - 1)) - 1u);
    const uint32_t normal = (magnitude - (kBias << 23) + rounding) >> kShift;
    const uint32_t subnormal = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kSubnormals)) - kSubnormals;
    const uint32_t rounded = magnitude < kSmallestNormal ? subnormal : normal;
    return (magnitude > 0x7f800000u ? 0x7fu : rounded) | ((bits >> 24) & 0x80u);
  }
};
using E4M3 = Float8<3, 0x7f>;
using E5M2 = Float8<2, 0x7c>;

}  // namespace jax_softmax::device
