// float8 to and from float32, shared by CPU and CUDA: by integers, since chips have no instruction for it or one that
// saturates, where JAX has infinities and NaNs.
#pragma once

#include <cstdint>

#include "ops.h"

namespace jax_softmax {

// A float of 8 bits, so many of them the mantissa's. kInfinite is what follows the largest finite number: infinity,
// or the NaN if there is none. `Bits` has the types V and U of floats and of their bits, which may be vectors, and says
// how one is taken for the other.
template <int kMantissa, uint32_t kInfinite>
struct Float8 {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kBias = 128 - (1u << (6 - kMantissa));  // so much smaller than float32's
  static constexpr uint32_t kSmallestNormal = (kBias + 1) << 23;
  // A float32 whose last bit is as much as the smallest subnormal.
  static constexpr uint32_t kSubnormals = (kBias + 24 - kMantissa) << 23;

  // Subnormals are made by sums with normal numbers, since XLA has processors take float32's for zero.
  template <class Bits>
  static JAX_SOFTMAX_INLINE typename Bits::V widen(typename Bits::U byte) {
    using U = typename Bits::U;
    const U magnitude = byte & 0x7fu, moved = magnitude << kShift;
    const U normal = moved + (kBias << 23);
    const U subnormal = Bits::bits(Bits::value(moved + kSmallestNormal) - Bits::value(U{} + kSmallestNormal));
    const U finite = moved < (1u << 23) ? subnormal : normal;
    const U bits = magnitude < kInfinite ? finite : moved | 0x7f800000u;
    return Bits::value(bits | ((byte & 0x80u) << 24));
  }

  // To nearest, ties to even.
  template <class Bits>
  static JAX_SOFTMAX_INLINE typename Bits::U narrow(typename Bits::V value) {
    using U = typename Bits::U;
    const U bits = Bits::bits(value), magnitude = bits & 0x7fffffffu;
    const U rounding = ((magnitude >> kShift) & 1u) + ((1u << (kShift - 1)) - 1u);
    const U normal = (magnitude - (kBias << 23) + rounding) >> kShift;
    const U subnormal = Bits::bits(Bits::value(magnitude) + Bits::value(U{} + kSubnormals)) - kSubnormals;
    U rounded = magnitude < kSmallestNormal ? subnormal : normal;
    rounded = rounded < kInfinite ? rounded : U{} + kInfinite;
    rounded = magnitude > 0x7f800000u ? U{} + 0x7fu : rounded;
    return rounded | ((bits >> 24) & 0x80u);
  }
};
using E4M3 = Float8<3, 0x7f>;
using E5M2 = Float8<2, 0x7c>;

}  // namespace jax_softmax
