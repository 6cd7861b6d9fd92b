// SIMD vectors by the compilers' vector extensions, for the instruction set that the including file is compiled for.
// All is in a namespace named after it, so that the linker keeps the instruction sets apart.
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

// Calls body(i) for i from 0 to n - 1, each a constant: compilers do not always unroll a loop that asks for it.
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
  static constexpr float kSqrtHalf = 0.70710678f;
  static constexpr int kLogTerms = 4;  // |s| <= 0.1716
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
  static constexpr double kSqrtHalf = 0.70710678118654752;
  static constexpr int kLogTerms = 10;
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
  // x, or 0 if x is infinity.
  static JAX_SOFTMAX_INLINE Value below_infinity(Value x) { return x == kInfinity ? constant(0) : x; }
  // Ignores a NaN in b.
  static JAX_SOFTMAX_INLINE Value max(Value a, Value b) { return b > a ? b : a; }
  static JAX_SOFTMAX_INLINE Value multiply_add(Value a, Value b, Value c) { return a * b + c; }

  static JAX_SOFTMAX_INLINE Value exp(Value x) {
    using K = ExpConstants<F>;
    x = x < K::kLow ? constant(K::kLow) : x;  // a NaN compares false and stays
    x = x > K::kHigh ? constant(K::kHigh) : x;
    Value shifted;
    const Value p = exp_of_fraction(x, &shifted);
    return scale_by_power_of_two(p, shifted - K::kRound, shifted);
  }

  // exp of an element less its row's maximum: x <= 0, or NaN. It costs less than exp, and subnormal results are 0.
  static JAX_SOFTMAX_INLINE Value exp_from_pivot(Value x) {
    using K = ExpConstants<F>;
    Value shifted;
    const Value p = exp_of_fraction(x, &shifted);
    const IntValue power = (bits_as<IntValue>(shifted) << K::kMantissa) + (Int{K::kBias} << K::kMantissa);
    return x < K::kLowNormal ? constant(0) : p * bits_as<Value>(power);
  }

  // Of x >= 0 or NaN: n ln(2) + log(m), where x = 2^n m and m lies around 1; log(m) = 2 artanh((m - 1) / (m + 1)).
  static JAX_SOFTMAX_INLINE Value log(Value x) {
    using K = ExpConstants<F>;
    const IntValue bits = bits_as<IntValue>(x);
    const IntValue exponent = (bits - bits_as<Int>(K::kSqrtHalf)) >> K::kMantissa;
    const Value m = bits_as<Value>(bits - (exponent << K::kMantissa));
    const Value n = __builtin_convertvector(exponent, Value);
    const Value s = (m - F(1)) / (m + F(1));
    const Value log_m = s * artanh<0, K::kLogTerms>(s * s);
    return select(x > 0, n * K::kLn2High + (n * K::kLn2Low + log_m), x - kInfinity);
  }

  static JAX_SOFTMAX_INLINE Value load(const F* p) {
    Value v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static JAX_SOFTMAX_INLINE void store(F* p, Value v) { std::memcpy(p, &v, sizeof(v)); }

  static JAX_SOFTMAX_INLINE IntValue first_lanes(int n) {
    IntValue lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return lane < static_cast<Int>(n);
  }

  // Whether each of n <= kLanes booleans is true; the other lanes are false.
  static JAX_SOFTMAX_INLINE IntValue true_lanes(const bool* p, int n) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1 << n) - 1), p);
    const __mmask16 lanes = _mm_test_epi8_mask(bytes, bytes);
    if constexpr (sizeof(F) == 4) {
      return (IntValue)_mm512_movm_epi32(lanes);
    } else {
      return (IntValue)_mm512_movm_epi64(static_cast<__mmask8>(lanes));
    }
#else
    Vector<uint8_t, 16> bytes{};
    n == kLanes ? std::memcpy(&bytes, p, kLanes) : std::memcpy(&bytes, p, n);
#if defined(__AVX2__)
    if constexpr (sizeof(F) == 4) {
      return (IntValue)_mm256_cvtepu8_epi32((__m128i)bytes) != 0;
    } else {
      return (IntValue)_mm256_cvtepu8_epi64((__m128i)bytes) != 0;
    }
#else
    IntValue lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = bytes[i];
    return lanes != 0;
#endif
#endif
  }

  // The first n < kLanes elements alone; the others are 0.
  static JAX_SOFTMAX_INLINE Value load_first(const F* p, int n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(F) == 4) {
      return (Value)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << n) - 1), p);
    } else {
      return (Value)_mm512_maskz_loadu_pd(static_cast<__mmask8>((1 << n) - 1), p);
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(F) == 4) {
      return (Value)_mm256_maskload_ps(p, (__m256i)first_lanes(n));
    } else {
      return (Value)_mm256_maskload_pd(p, (__m256i)first_lanes(n));
    }
#else
    Value v{};
    std::memcpy(&v, p, n * sizeof(F));
    return v;
#endif
  }
  static JAX_SOFTMAX_INLINE void store_first(F* p, Value v, int n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(F) == 4) {
      _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1 << n) - 1), (__m512)v);
    } else {
      _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1 << n) - 1), (__m512d)v);
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(F) == 4) {
      _mm256_maskstore_ps(p, (__m256i)first_lanes(n), (__m256)v);
    } else {
      _mm256_maskstore_pd(p, (__m256i)first_lanes(n), (__m256d)v);
    }
#else
    std::memcpy(p, &v, n * sizeof(F));
#endif
  }

  // Reduces the lanes of each of kLanes vectors with f: vector i's to lane i, in an order that does not depend on i. V
  // is a vector, or a struct of vectors.
  template <class V, class Combine>
  static JAX_SOFTMAX_INLINE V reduce_rows(V (&v)[kLanes], Combine f) {
    return halve<kLanes / 2>(v, f);
  }

 private:
  // A step of it: 2 * half neighbouring lanes are of one vector before, `half` after.
  template <int half, class V, class Combine>
  static JAX_SOFTMAX_INLINE V halve(V* v, Combine f) {
    unrolled<half>([&](auto i) __attribute__((always_inline)) {
      v[i] = f(halves<half, false>(v[i], v[i + half]), halves<half, true>(v[i], v[i + half]));
    });
    if constexpr (half == 1) {
      return v[0];
    } else {
      return halve<half / 2>(v, f);
    }
  }
  // The lower or upper halves of a's and b's blocks of 2 * half lanes, side by side.
  template <int half, bool upper, class V>
  static JAX_SOFTMAX_INLINE V halves(V a, const V& b) {
    constexpr int kVectors = sizeof(V) / sizeof(Value);
    Value of_a[kVectors], of_b[kVectors];
    std::memcpy(of_a, &a, sizeof(V));
    std::memcpy(of_b, &b, sizeof(V));
    unrolled<kVectors>([&](auto k) __attribute__((always_inline)) {
      of_a[k] = halves<half, upper>(of_a[k], of_b[k], std::make_integer_sequence<int, kLanes>());
    });
    std::memcpy(&a, of_a, sizeof(V));
    return a;
  }
  template <int half, bool upper, int... lane>
  static JAX_SOFTMAX_INLINE Value halves(Value a, Value b, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(a, b,
                                   (lane % (2 * half) < half ? lane + upper * half : kLanes + lane - !upper * half)...);
  }

  // 2 artanh(s) / s = 2 + 2/3 z + 2/5 z^2 ..., where z = s^2, from the i-th term on and divided by z^i.
  template <int i, int last>
  static JAX_SOFTMAX_INLINE Value artanh(Value z) {
    constexpr F kCoefficient = F(2) / (2 * i + 1);
    if constexpr (i == last) {
      return constant(kCoefficient);
    } else {
      return artanh<i + 1, last>(z) * z + kCoefficient;
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
