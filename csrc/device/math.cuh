// The policies (see ops.h) for CUDA: the arithmetic that each element type is computed in.
#pragma once

#include "device/float8.cuh"
#include "device/types.cuh"
#include "ops.h"

namespace jax_softmax::device {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
template <class Format>
struct Byte {
  uint8_t bits;
};
// Of side operands alone, as UInt8.
struct Int32 {
  int bits;
};
struct Bool {
  uint8_t bits;
};
using Float8E4M3 = Byte<E4M3>;
using Float8E5M2 = Byte<E5M2>;
using Int8 = Byte<int8_t>;
using UInt8 = Byte<uint8_t>;

// float32, with the library's exponentials.
struct Precise {
  using Value = float;
  static constexpr float kInfinity = static_cast<float>(1.0 / 0.0);  // NVRTC has no builtin for it in all versions
  static __device__ __forceinline__ float constant(float c) { return c; }
  // x, or 0 if x is infinity.
  static __device__ __forceinline__ float below_infinity(float x) { return x == kInfinity ? 0.0f : x; }
  static __device__ __forceinline__ bool equal(float a, float b) { return a == b; }
  static __device__ __forceinline__ float select(bool condition, float a, float b) { return condition ? a : b; }
  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }  // ignores a NaN
  static __device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ float exp_from_pivot(float x) { return expf(x); }
  static __device__ __forceinline__ float log(float x) { return logf(x); }
};

// The same with the chip's approximate exp2, for elements and results of 16 bits or 8. The rounded product x log2(e)
// has a relative error of 2^-24, so exp has one of at most 87 * 2^-24 where it is not 0: far less than rounding to 16
// bits.
struct Approximate : Precise {
  static constexpr float kLog2E = 1.44269502f;
  static __device__ __forceinline__ float exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }
  static __device__ __forceinline__ float exp(float x) { return exp2(x * kLog2E); }
};

// For softmax of float32: see its Relative.
struct RangeReduced : Precise {};

// The arithmetic of an operator, by the widest type that it reads and writes.
template <template <class> class Op, class T>
struct ArithmeticOf {
  using type = Approximate;
};
template <template <class> class Op>
struct ArithmeticOf<Op, float> {
  using type = Precise;
};
template <>
struct ArithmeticOf<Softmax, float> {
  using type = RangeReduced;
};

// The larger one, or NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a > b || a != a ? a : b;
#endif
}
__device__ __forceinline__ float min_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
#else
  return a < b || a != a ? a : b;
#endif
}

// Divides a row's elements by its absmax, which no element is larger than; by 0 the quotients are 0.
template <class M>
struct Divisor;

// A quotient, from an approximate one.
__device__ __forceinline__ float corrected(float quotient, float x, float divisor, float inverse) {
  return fmaf(-fmaf(quotient, divisor, -x), inverse, quotient);
}

// Off by at most a unit in the last place, and exact where the quotient is a float32. So it rounds to 16 bits as the
// exact quotient does: a quotient of 16-bit numbers that is not halfway between two such numbers is at least two units
// of float32 away from there.
template <>
struct Divisor<Approximate> {
  float value, inverse;

  Divisor() = default;
  explicit __device__ __forceinline__ Divisor(float of_row) {
    const bool divides = of_row != 0.0f && of_row != Approximate::kInfinity;
    value = divides ? of_row : 0.0f;
    inverse = divides ? 1.0f / of_row : 0.0f;
  }
  __device__ __forceinline__ float divide(float x) const { return corrected(x * inverse, x, value, inverse); }
};

// Rounded to nearest, if the quotient is 2^-100 or more: the correction of a quotient that is off by less than a unit
// in the last place, by an inverse that is rounded to nearest, is rounded to nearest (Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990). Both numbers are multiplied by a power of 2 so
// that nothing underflows.
template <>
struct Divisor<Precise> {
  float power, value, inverse;

  Divisor() = default;
  explicit __device__ __forceinline__ Divisor(float of_row) {
    const bool divides = of_row != 0.0f && of_row != Approximate::kInfinity;
    const int exponent = static_cast<int>(__float_as_uint(of_row) >> 23);
    power = divides ? __uint_as_float(static_cast<uint32_t>(max(254 - exponent, 1)) << 23) : 0.0f;
    value = divides ? of_row * power : 1.0f;
    inverse = 1.0f / value;
  }
  __device__ __forceinline__ float divide(float x) const {
    const float moved = x * power;
    return corrected(corrected(moved * inverse, moved, value, inverse), moved, value, inverse);
  }
};

// The arithmetic of AbsmaxScale. The maximum is NaN if an element is. A scale that would be subnormal is 0, and so are
// the row's results.
template <class M>
struct Scaling : M {
  static __device__ __forceinline__ float max(float a, float b) { return max_or_nan(a, b); }
  static __device__ __forceinline__ float abs(float x) { return fabsf(x); }
  static __device__ __forceinline__ float normal_or_zero(float scale) { return scale < 0x1p-126f ? 0.0f : scale; }
};

// Results of 16 bits and more: the scale is the row's absmax.
template <class Out, class M>
struct ScaledTo : Scaling<M> {
  static __device__ __forceinline__ float scale(float absmax) { return Scaling<M>::normal_or_zero(absmax); }
  struct Scaler {
    Divisor<M> divisor;
    Scaler() = default;
    explicit __device__ __forceinline__ Scaler(float absmax) : divisor(scale(absmax)) {}
    friend __device__ __forceinline__ float operator*(float x, const Scaler& scaler) {
      return scaler.divisor.divide(x);
    }
  };
};

template <class Format>
inline constexpr float kLargest = 127.0f;
template <>
inline constexpr float kLargest<E4M3> = 448.0f;
template <>
inline constexpr float kLargest<E5M2> = 57344.0f;

// Results of 8 bits: absmax becomes the type's largest number.
template <class Format, class M>
struct ScaledTo<Byte<Format>, M> : Scaling<M> {
  static constexpr float kFull = kLargest<Format>;
  static __device__ __forceinline__ float scale(float absmax) {
    return Scaling<M>::normal_or_zero(absmax * (1.0f / kFull));
  }
  struct Scaler {
    float value;
    Scaler() = default;
    explicit __device__ __forceinline__ Scaler(float absmax) : value(scale(absmax) == 0.0f ? 0.0f : kFull / absmax) {}
    // Rounded, whatever it is used for.
    friend __device__ __forceinline__ float operator*(float x, const Scaler& scaler) {
      return __fmul_rn(x, scaler.value);
    }
  };
};

// The policy of an operator. T is the widest type that it reads and writes, Out that of the first result.
template <template <class> class Op, class T, class Out>
struct PolicyOf {
  using Arithmetic = typename ArithmeticOf<Op, T>::type;
  using type = typename Conditional<Op<Arithmetic>::kKeepsInfinity, KeepingInfinity<Arithmetic>, Arithmetic>::type;
};
template <class T, class Out>
struct PolicyOf<AbsmaxScale, T, Out> {
  using type = ScaledTo<Out, typename ArithmeticOf<AbsmaxScale, T>::type>;
};

}  // namespace jax_softmax::device

namespace jax_softmax {

// Nothing is summed.
template <class Out, class M>
struct Relative<device::ScaledTo<Out, M>> {
  Relative() = default;
  explicit __device__ __forceinline__ Relative(float) {}
  __device__ __forceinline__ float rescale(float) const { return 1.0f; }
};

// A term is one fused multiply-add and one power: exp2(x log2(e) - r), where r is pivot log2(e), rounded. That rounding
// is a factor that all terms share; `rescale`, `log` and `whole` take it into account. It would overflow for pivots
// beyond 2^30. So from 2^24 on r is the pivot, and x stands for x log2(e): 16-bit numbers other than such a pivot
// differ from it by 2^13 or more, and their terms are 0 either way.
template <>
struct Relative<device::Approximate> {
  using M = device::Approximate;
  static constexpr float kLarge = 1 << 24;
  float factor;
  float subtrahend;
  float pivot;

  Relative() = default;
  explicit __device__ __forceinline__ Relative(float unshielded) : pivot(shielded<M>(unshielded)) {
    factor = factor_of(pivot);
    subtrahend = __fmul_rn(pivot, factor);  // rounded, whatever it is used for
  }
  static __device__ __forceinline__ float factor_of(float pivot) { return fabsf(pivot) < kLarge ? M::kLog2E : 1.0f; }
  __device__ __forceinline__ float exp(float x) const { return M::exp2(fmaf(x, factor, -subtrahend)); }
  __device__ __forceinline__ float log(float sum) const {
    return M::log(sum) - 0.693147182f * fmaf(pivot, factor, -subtrahend);
  }
  __device__ __forceinline__ float whole(float sum) const { return sum * M::exp2(-fmaf(pivot, factor, -subtrahend)); }
  __device__ __forceinline__ float rescale(float from) const {
    const float its_factor = factor_of(from);
    return its_factor == factor ? M::exp2(__fmul_rn(from, its_factor) - subtrahend) : 0.0f;
  }
  static __device__ __forceinline__ float divide(float x, float sum) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
    return x * inverse;
  }
};

// A term is 2^(x log2(e) - n), where n is pivot log2(e), rounded to an integer: a power of the element itself and not
// of its rounded distance from the pivot. The exponent is reduced as in Cody and Waite, "Software Manual for the
// Elementary Functions" (1980), with log2(e) in two parts, so that terms far below the pivot have no larger errors than
// others; and rescaling to another pivot is exact. So that n fits, x and the pivot are taken relative to an origin: the
// pivot rounded toward zero to a multiple of 2^20. The distance of an element near the pivot from the origin is exact.
template <>
struct Relative<device::RangeReduced> {
  static constexpr float kLog2E = 1.44269502f, kLog2ERest = 1.92596303e-8f;
  // 1.5 * 2^23: adding it rounds to an integer, in the sum's last bits; and the bias of the exponent.
  static constexpr float kToInteger = 12582912.0f, kBias = 127.0f;
  static constexpr float kLargest = 3.40282347e38f;
  float origin;
  float to_integer;  // kToInteger + kBias - n

  Relative() = default;
  explicit __device__ __forceinline__ Relative(float unshielded) {
    const float pivot = shielded<device::RangeReduced>(unshielded);
    origin = origin_of(pivot);
    to_integer = kToInteger + kBias - power_of(pivot - origin);
  }
  static __device__ __forceinline__ float origin_of(float pivot) { return truncf(pivot * 0x1p-20f) * 0x1p20f; }
  static __device__ __forceinline__ float power_of(float x) { return fmaf(x, kLog2E, kToInteger) - kToInteger; }
  // e^x 2^n, where the integer n is given as n + kToInteger + kBias.
  static __device__ __forceinline__ float exp_times_power(float x, float to_integer) {
    // The power of 2 must be a normal number; a fraction of it need not be. A NaN is ignored here.
    const float integer = fmaxf(fmaf(x, kLog2E, to_integer), kToInteger + 1.0f);
    const float power = integer - to_integer;
    const float fraction = fmaf(x, kLog2ERest, fmaf(x, kLog2E, -power));
    return device::Approximate::exp2(fraction) * __uint_as_float(__float_as_uint(integer) << 23);
  }
  __device__ __forceinline__ float exp(float x) const { return exp_times_power(x - origin, to_integer); }
  // Without a branch, since states come by the hundred.
  __device__ __forceinline__ float rescale(float from) const {
    const float finite = fmaxf(from, -kLargest);  // a state of no elements has a sum of 0
    const float its_origin = origin_of(finite);
    return exp_times_power(its_origin - origin, to_integer + power_of(finite - its_origin));
  }
  // A quotient of twice the precision, so that its product with a term is rounded once: if that term is the whole sum,
  // the product is 1.
  struct Quotient {
    float rounded, rest;
    friend __device__ __forceinline__ float operator*(float x, const Quotient& quotient) {
      return fmaf(x, quotient.rounded, x * quotient.rest);
    }
  };
  static __device__ __forceinline__ Quotient divide(float x, float sum) {
    const float rounded = x / sum;
    return {rounded, __fdividef(fmaf(-rounded, sum, x), sum)};
  }
};

}  // namespace jax_softmax
