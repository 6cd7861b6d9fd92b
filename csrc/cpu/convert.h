// Types in memory: elements of type T are computed as Convert<T>::Compute.
#pragma once

#include <cstring>

#include "cpu/simd.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

struct Int8 {
  uint8_t bits;  // of two's complement
};

// load(p) and store(p, v) of vectors with Compute's number of lanes; load_first and store_first of the first n lanes.
template <class T>
struct Convert;

template <>
struct Convert<float> : Simd<float> {
  using Compute = float;
};
template <>
struct Convert<double> : Simd<double> {
  using Compute = double;
};

// `Derived` has widen and narrow. Intrinsics stand where compilers make several instructions of what one or two do.
template <class Derived, class T>
struct Convert16 {
  using Compute = float;
  static constexpr int kLanes = Simd<float>::kLanes;
  using V = Vector<float, kLanes>;
  using U32 = Vector<uint32_t, kLanes>;
  using U16 = Vector<uint16_t, kLanes>;

  static JAX_SOFTMAX_INLINE V load(const T* p) {
    U16 bits;
    std::memcpy(&bits, p, sizeof(bits));
    return Derived::widen(bits);
  }
  static JAX_SOFTMAX_INLINE void store(T* p, V v) {
    const U16 bits = Derived::narrow(v);
    std::memcpy(p, &bits, sizeof(bits));
  }
  static JAX_SOFTMAX_INLINE V load_first(const T* p, int n) {
#if defined(__AVX512F__)
    return Derived::widen((U16)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << n) - 1), p));
#else
    U16 bits{};
    std::memcpy(&bits, p, n * sizeof(T));
    return Derived::widen(bits);
#endif
  }
  static JAX_SOFTMAX_INLINE void store_first(T* p, V v, int n) {
    const U16 bits = Derived::narrow(v);
#if defined(__AVX512F__)
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1 << n) - 1), (__m256i)bits);
#else
    std::memcpy(p, &bits, n * sizeof(T));
#endif
  }

 protected:
  static JAX_SOFTMAX_INLINE U32 zero_extended(U16 bits) {
#if defined(__AVX512F__)
    return (U32)_mm512_cvtepu16_epi32((__m256i)bits);
#elif defined(__AVX2__)
    return (U32)_mm256_cvtepu16_epi32((__m128i)bits);
#else
    return __builtin_convertvector(bits, U32);
#endif
  }
  // No element has more than 16 bits.
  static JAX_SOFTMAX_INLINE U16 packed(U32 bits) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (U16)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
#else
    return __builtin_convertvector(bits, U16);
#endif
  }
};

// Of results alone: magnitudes below 128, rounded to nearest, ties to even; NaN becomes 0.
template <>
struct Convert<Int8> {
  static constexpr int kLanes = Simd<float>::kLanes;
  using V = Vector<float, kLanes>;
  using I32 = Vector<int32_t, kLanes>;

  static JAX_SOFTMAX_INLINE void store(Int8* p, V v) { store_first(p, v, kLanes); }
  static JAX_SOFTMAX_INLINE void store_first(Int8* p, V v, int n) {
    const auto bytes = __builtin_convertvector(rounded(v), Vector<uint8_t, kLanes>);
    std::memcpy(p, &bytes, n);
  }

 private:
  // Integers, of which the last 8 bits count. They are 0 of NaN: the processor's invalid integer is 0x80000000.
  static JAX_SOFTMAX_INLINE I32 rounded(V v) {
#if defined(__AVX512F__)
    return (I32)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
    return (I32)_mm256_cvtps_epi32((__m256)v);
#else
    v = v == v ? v : V{};
    return bits_as<I32>(v + ExpConstants<float>::kRound);
#endif
  }
};

template <>
struct Convert<BFloat16> : Convert16<Convert<BFloat16>, BFloat16> {
  static JAX_SOFTMAX_INLINE V widen(U16 bits) { return bits_as<V>(zero_extended(bits) << 16); }
  static JAX_SOFTMAX_INLINE U16 narrow(V v) {
    const U32 bits = bits_as<U32>(v);
    const U32 rounded = bits + (0x7fffu + ((bits >> 16) & 1u));  // to nearest, ties to even
    return packed((v == v ? rounded : bits | 0x400000u) >> 16);
  }
};

template <>
struct Convert<Half> : Convert16<Convert<Half>, Half> {
#if defined(__AVX512F__)
  static JAX_SOFTMAX_INLINE V widen(U16 bits) { return (V)_mm512_cvtph_ps((__m256i)bits); }
  static JAX_SOFTMAX_INLINE U16 narrow(V v) { return (U16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__)
  static JAX_SOFTMAX_INLINE V widen(U16 bits) { return (V)_mm256_cvtph_ps((__m128i)bits); }
  static JAX_SOFTMAX_INLINE U16 narrow(V v) { return (U16)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#else
  static JAX_SOFTMAX_INLINE V widen(U16 bits) {
    const U32 h = zero_extended(bits);
    // The exponent is shifted to float's position and its bias corrected. Subnormals are an exact difference of normal
    // numbers, since XLA has the processor treat subnormals as 0.
    const U32 moved = (h & 0x7fffu) << 13;
    const V subnormal = bits_as<V>(moved + (113u << 23)) - bits_as<float>(uint32_t{113u << 23});
    const U32 magnitude = moved < (1u << 23) ? bits_as<U32>(subnormal) : moved + (112u << 23);
    const U32 infinite = (h & 0x7c00u) == 0x7c00u ? U32{} + 0x7f800000u : U32{};
    return bits_as<V>(magnitude | infinite | ((h & 0x8000u) << 16));
  }
  static JAX_SOFTMAX_INLINE U16 narrow(V v) {
    const U32 bits = bits_as<U32>(v);
    const U32 sign = (bits >> 16) & 0x8000u;
    const U32 magnitude = bits & 0x7fffffffu;
    const U32 normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves a subnormal's mantissa, rounded to even, in the low bits.
    const U32 subnormal = bits_as<U32>(bits_as<V>(magnitude) + 0.5f) - 0x3f000000u;
    U32 half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? U32{} + 0x7c00u : half;
    half = magnitude > 0x7f800000u ? U32{} + 0x7e00u : half;
    return packed(sign | half);
  }
#endif
};

}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
