// SIMD vectors over the compilers' vector extensions, for the instruction set that the including file is compiled for.
// Everything stands in a namespace named after it, so that the linker never mixes two of them up.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ops.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class T, int n>
struct VectorOf {
  typedef T type __attribute__((vector_size(n * sizeof(T))));
};
template <class T, int n>
using Vector = typename VectorOf<T, n>::type;

// Calls body(i) for i from 0 to n - 1, each a constant: a loop that only asks to be unrolled sometimes is not.
template <class Body, int... i>
JAX_SOFTMAX_INLINE void unrolled(std::integer_sequence<int, i...>, Body body) {
  (body(std::integral_constant<int, i>()), ...);
}
template <int n, class Body>
JAX_SOFTMAX_INLINE void unrolled(Body body) {
  unrolled(std::make_integer_sequence<int, n>(), body);
}
template <class To, class From>
JAX_SOFTMAX_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class F>
struct ExpConstants;

// exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2)/2: Taylor's coefficients to the order at which the first one left out is
// below a quarter of a unit in the last place. ln(2) is split so that n * kLn2High is exact (Cody & Waite, 1980).
template <>
struct ExpConstants<float> {
  using Int = int32_t;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kRound = 12582912.0f;           // 1.5 * 2^23: adding it rounds to an integer in the low bits
  static constexpr float kLow = -105.0f, kHigh = 89.0f;  // beyond: 0 and infinity
  static constexpr float kLowNormal = -87.336540f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr int kTerms = 6;
};
template <>
struct ExpConstants<double> {
  using Int = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr double kLow = -746.0, kHigh = 710.0;
  static constexpr double kLowNormal = -708.39641853226408;
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr int kTerms = 12;
};

// The policy (see ops.h) of vectors of F, which is float or double.
template <class F>
struct Simd {
  using Scalar = F;
  static constexpr int kLanes = kVectorBytes / sizeof(F);
  using Value = Vector<F, kLanes>;
  using Int = typename ExpConstants<F>::Int;
  using IntValue = Vector<Int, kLanes>;
  static constexpr F kInfinity = std::numeric_limits<F>::infinity();

  static JAX_SOFTMAX_INLINE Value constant(F c) { return Value{} + c; }
  static JAX_SOFTMAX_INLINE IntValue equal(Value a, Value b) { return a == b; }
  static JAX_SOFTMAX_INLINE Value select(IntValue condition, Value a, Value b) { return condition ? a : b; }
  // Ignores a NaN in b.
  static JAX_SOFTMAX_INLINE Value max(Value a, Value b) { return b > a ? b : a; }

  static JAX_SOFTMAX_INLINE Value exp(Value x) {
    using K = ExpConstants<F>;
    x = x < K::kLow ? constant(K::kLow) : x;  // a NaN compares false and stays
    x = x > K::kHigh ? constant(K::kHigh) : x;
    Value shifted;
    const Value p = exp_of_fraction(x, &shifted);
    return scale_by_power_of_two(p, shifted - K::kRound, shifted);
  }

  // Of x <= 0 or NaN, for less: what would be subnormal is 0.
  static JAX_SOFTMAX_INLINE Value exp_of_negative(Value x) {
    using K = ExpConstants<F>;
    Value shifted;
    const Value p = exp_of_fraction(x, &shifted);
    const IntValue power = (bits_as<IntValue>(shifted) << K::kMantissa) + (Int{K::kBias} << K::kMantissa);
    return x < K::kLowNormal ? constant(0) : p * bits_as<Value>(power);
  }

  static JAX_SOFTMAX_INLINE Value log(Value x) {  // once a row: no need of a vectorised one
    for (int i = 0; i < kLanes; ++i) x[i] = sizeof(F) == 4 ? __builtin_logf(x[i]) : __builtin_log(x[i]);
    return x;
  }

  // Reduces x over its lanes with f, in a tree whose order is fixed, and returns the result in every lane.
  template <class Function>
  static JAX_SOFTMAX_INLINE Value across_lanes(Value x, Function f) {
    return constant(fold<kLanes>(x, f, std::make_integer_sequence<int, kLanes / 2>()));
  }

 private:
  template <int n, class Function, int... lane>
  static JAX_SOFTMAX_INLINE F fold(Vector<F, n> x, Function f, std::integer_sequence<int, lane...>) {
    if constexpr (n == 2) {
      return f(x[0], x[1]);
    } else {
      const Vector<F, n / 2> low = __builtin_shufflevector(x, x, lane...);
      const Vector<F, n / 2> high = __builtin_shufflevector(x, x, (lane + n / 2)...);
      return fold<n / 2>(f(low, high), f, std::make_integer_sequence<int, n / 4>());
    }
  }
  // The sum of r^(i - first) / i! for i from `first` to `last`. The coefficients are constants by force: in a
  // loop, the optimizer would leave some to be computed at run time.
  template <int first, int last>
  static JAX_SOFTMAX_INLINE Value taylor(Value r) {
    constexpr F kCoefficient = F(1) / factorial(first);
    if constexpr (first == last) {
      return constant(kCoefficient);
    } else {
      return taylor<first + 1, last>(r) * r + kCoefficient;
    }
  }
  static constexpr F factorial(int n) { return n <= 1 ? F(1) : F(n) * factorial(n - 1); }

  // exp(x - n ln(2)), where n, the integer next to x / ln(2), stands in the low bits of *shifted.
  static JAX_SOFTMAX_INLINE Value exp_of_fraction(Value x, Value* shifted) {
    using K = ExpConstants<F>;
    *shifted = x * F(1.44269504088896340736) + K::kRound;
    const Value n = *shifted - K::kRound;
    const Value r = (x - n * K::kLn2High) - n * K::kLn2Low;
    const Value p = taylor<2, K::kTerms + 1>(r);
    return (p * r) * r + r + F(1);
  }

  // p * 2^n in two steps, since 2^n itself may be no normal number where the product is one.
  static JAX_SOFTMAX_INLINE Value scale_by_power_of_two(Value p, Value n, Value shifted) {
#if defined(__AVX512F__)
    (void)shifted;
    if constexpr (sizeof(F) == 4) {
      return (Value)_mm512_scalef_ps((__m512)p, (__m512)n);
    } else {
      return (Value)_mm512_scalef_pd((__m512d)p, (__m512d)n);
    }
#else
    (void)n;
    using K = ExpConstants<F>;
    const IntValue exponent = bits_as<IntValue>(shifted) - bits_as<Int>(K::kRound);
    const IntValue half = exponent >> 1;
    return p * bits_as<Value>((half + K::kBias) << K::kMantissa) *
           bits_as<Value>((exponent - half + K::kBias) << K::kMantissa);
#endif
  }
};

}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA

namespace jax_softmax {

// No term's exponent is positive: the pivot is the maximum.
template <class F>
struct Relative<cpu::JAX_SOFTMAX_ISA::Simd<F>> {
  using M = cpu::JAX_SOFTMAX_ISA::Simd<F>;
  using C = typename M::Value;
  C pivot;

  Relative() = default;
  explicit JAX_SOFTMAX_INLINE Relative(C unshielded) : pivot(shielded<M>(unshielded)) {}
  JAX_SOFTMAX_INLINE C exp(C x) const { return M::exp_of_negative(x - pivot); }
  JAX_SOFTMAX_INLINE C log(C sum) const { return M::log(sum); }
  JAX_SOFTMAX_INLINE C rescale(C from) const { return M::exp_of_negative(from - pivot); }
  static JAX_SOFTMAX_INLINE C divide(C x, C sum) { return x / sum; }
};

}  // namespace jax_softmax

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {

// Storage types. Memory holds T; arithmetic is done in Convert<T>::Compute.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct Convert;

template <class F>
struct ConvertSame {
  using Compute = F;
  using V = typename Simd<F>::Value;
  static JAX_SOFTMAX_INLINE V load(const F* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static JAX_SOFTMAX_INLINE void store(F* p, V v) { std::memcpy(p, &v, sizeof(v)); }
};
template <>
struct Convert<float> : ConvertSame<float> {};
template <>
struct Convert<double> : ConvertSame<double> {};

// 16-bit types as vectors of unsigned 16-bit and 32-bit integers.
struct Convert16 {
  using Compute = float;
  static constexpr int n = Simd<float>::kLanes;
  using V = Vector<float, n>;
  using U32 = Vector<uint32_t, n>;
  using I32 = Vector<int32_t, n>;
  using U16 = Vector<uint16_t, n>;

  // Compilers take several instructions for what one or two do.
  template <class T>
  static JAX_SOFTMAX_INLINE U32 load_bits(const T* p) {
#if defined(__AVX512F__)
    return (U32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (U32)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    U16 bits;
    std::memcpy(&bits, p, sizeof(bits));
    return __builtin_convertvector(bits, U32);
#endif
  }
  // No element has more than 16 bits.
  template <class T>
  static JAX_SOFTMAX_INLINE void store_bits(T* p, U32 bits) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i low = _mm256_castsi256_si128((__m256i)bits), high = _mm256_extracti128_si256((__m256i)bits, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
#else
    const U16 narrow = __builtin_convertvector(bits, U16);
    std::memcpy(p, &narrow, sizeof(narrow));
#endif
  }
};

template <>
struct Convert<BFloat16> : Convert16 {
  static JAX_SOFTMAX_INLINE V load(const BFloat16* p) { return bits_as<V>(load_bits(p) << 16); }
  static JAX_SOFTMAX_INLINE void store(BFloat16* p, V v) {
    const U32 bits = bits_as<U32>(v);
    const U32 rounded = bits + (0x7fffu + ((bits >> 16) & 1u));  // to nearest, ties to even
    store_bits(p, (v == v ? rounded : bits | 0x400000u) >> 16);
  }
};

template <>
struct Convert<Half> : Convert16 {
#if defined(__AVX512F__)
  static JAX_SOFTMAX_INLINE V load(const Half* p) {
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static JAX_SOFTMAX_INLINE void store(Half* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  static JAX_SOFTMAX_INLINE V load(const Half* p) {
    return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static JAX_SOFTMAX_INLINE void store(Half* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static JAX_SOFTMAX_INLINE V load(const Half* p) {
    const U32 h = load_bits(p);
    // The exponent's field moved into place and its bias mended; subnormals by a subtraction that is exact, of numbers
    // that are normal, since XLA has the processor take others for zero.
    const U32 moved = (h & 0x7fffu) << 13;
    const V subnormal = bits_as<V>(moved + (113u << 23)) - bits_as<float>(uint32_t{113u << 23});
    const U32 magnitude = moved < (1u << 23) ? bits_as<U32>(subnormal) : moved + (112u << 23);
    const U32 infinite = (h & 0x7c00u) == 0x7c00u ? U32{} + 0x7f800000u : U32{};
    return bits_as<V>(magnitude | infinite | ((h & 0x8000u) << 16));
  }
  static JAX_SOFTMAX_INLINE void store(Half* p, V v) {
    const U32 bits = bits_as<U32>(v);
    const U32 sign = (bits >> 16) & 0x8000u;
    const U32 magnitude = bits & 0x7fffffffu;
    const U32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves a subnormal's mantissa, rounded to even, in the low bits.
    const U32 subnormal = bits_as<U32>(bits_as<V>(magnitude) + 0.5f) - 0x3f000000u;
    U32 half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? U32{} + 0x7c00u : half;
    half = magnitude > 0x7f800000u ? U32{} + 0x7e00u : half;
    store_bits(p, sign | half);
  }
#endif
};

}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
