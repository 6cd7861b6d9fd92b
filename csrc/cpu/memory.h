// Memory as the operands have it: storage types, masks, and elements that lie apart.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/simd.h"

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

template <>
struct Convert<float> : Simd<float> {
  using Compute = float;
};
template <>
struct Convert<double> : Simd<double> {
  using Compute = double;
};

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

namespace {

// Pieces of memory, each of neighbouring elements.
struct Pieces {
  int64_t count, length;
  int64_t step;        // from a piece to the next, in memory
  int64_t mask_step;   // the same of the mask
  int64_t mask_along;  // from an element of the mask to the next: 0 or 1
  int64_t held_step;   // from a piece to the next, where they are held
};

// Moves elements between memory, where they have their storage type and a mask, and blocks of floats or doubles.
template <class F>
struct Mover {
  using Compute = F;
  // `mask` may be null; masked elements become `pad`.
  void (*load)(const void* memory, int64_t at, const bool* mask, F pad, F* held, const Pieces& pieces);
  // Masked elements become `masked`.
  void (*store)(const F* held, const bool* mask, F masked, void* memory, int64_t at, const Pieces& pieces);
  bool same;  // whether the storage type is F
};

template <class T>
class Move {
 public:
  using F = typename Convert<T>::Compute;
  static constexpr Mover<F> mover() { return {load, store, std::is_same_v<T, F>}; }

 private:
  using M = Simd<F>;
  static constexpr int kLanes = M::kLanes;

  static void load(const void* memory, int64_t at, const bool* mask, F pad, F* held, const Pieces& pieces) {
    const T* const from = static_cast<const T*>(memory) + at;
    for_vectors(mask, pieces, [&](int64_t piece, int64_t i, int n, auto masked) __attribute__((always_inline)) {
      typename M::Value v;
      if (n == kLanes) {
        v = Convert<T>::load(from + piece * pieces.step + i);
      } else {
        T padded[kLanes] = {};
        std::memcpy(padded, from + piece * pieces.step + i, n * sizeof(T));
        v = Convert<T>::load(padded);
      }
      if constexpr (masked) {
        v = M::select(unmasked(mask + piece * pieces.mask_step, pieces.mask_along, i, n), v, M::constant(pad));
      }
      F* const to = held + piece * pieces.held_step + i;
      n == kLanes ? M::store(to, v) : M::store_first(to, v, n);
    });
  }

  static void store(const F* held, const bool* mask, F masked_value, void* memory, int64_t at, const Pieces& pieces) {
    T* const to = static_cast<T*>(memory) + at;
    for_vectors(mask, pieces, [&](int64_t piece, int64_t i, int n, auto masked) __attribute__((always_inline)) {
      const F* const from = held + piece * pieces.held_step + i;
      typename M::Value v = n == kLanes ? M::load(from) : M::load_first(from, n, M::constant(0));
      if constexpr (masked) {
        v = M::select(unmasked(mask + piece * pieces.mask_step, pieces.mask_along, i, n), v, M::constant(masked_value));
      }
      if (n == kLanes) {
        Convert<T>::store(to + piece * pieces.step + i, v);
      } else {
        T padded[kLanes];
        Convert<T>::store(padded, v);
        std::memcpy(to + piece * pieces.step + i, padded, n * sizeof(T));
      }
    });
  }

  template <class Body>
  static JAX_SOFTMAX_INLINE void for_vectors(const bool* mask, Pieces pieces, Body body) {
    const int64_t n = pieces.length;
    if (pieces.step == n && pieces.held_step == n && (!mask || pieces.mask_step == n * pieces.mask_along)) {
      pieces.length *= pieces.count;
      pieces.count = 1;
    }
    const auto loop = [&](auto masked) __attribute__((always_inline)) {
      for (int64_t piece = 0; piece < pieces.count; ++piece) {
        int64_t i = 0;
        for (; i + kLanes <= pieces.length; i += kLanes) body(piece, i, kLanes, masked);
        if (i < pieces.length) body(piece, i, static_cast<int>(pieces.length - i), masked);
      }
    };
    mask ? loop(std::true_type()) : loop(std::false_type());
  }

  static JAX_SOFTMAX_INLINE typename M::IntValue unmasked(const bool* mask, int64_t along, int64_t i, int n) {
    if (along == 0) return typename M::IntValue{} - static_cast<typename M::Int>(*mask);
    Vector<uint8_t, kLanes> byte{};
    if (n == kLanes) {
      std::memcpy(&byte, mask + i, kLanes);
    } else {
      std::memcpy(&byte, mask + i, n);
    }
    return __builtin_convertvector(byte, typename M::IntValue) != 0;
  }
};

// ---- Transposing

template <int first, class V, int... j>
JAX_SOFTMAX_INLINE V interleave(V a, V b, std::integer_sequence<int, j...>) {
  return __builtin_shufflevector(a, b, (first + j / 2 + j % 2 * static_cast<int>(sizeof...(j)))...);
}

// Writes to[c * to_step + r] = from[r * from_step + c] for r and c below n, a power of 2.
template <int n, class F>
JAX_SOFTMAX_INLINE void transpose_square(const F* from, int64_t from_step, F* to, int64_t to_step) {
  using V = Vector<F, n>;
  using Lanes = std::make_integer_sequence<int, n>;
  V v[n], mixed[n];
  unrolled<n>([&](auto i) __attribute__((always_inline)) { std::memcpy(&v[i], from + i * from_step, sizeof(V)); });
  unrolled<__builtin_ctz(n)>([&](auto) __attribute__((always_inline)) {
    unrolled<n / 2>([&](auto i) __attribute__((always_inline)) {
      mixed[2 * i] = interleave<0>(v[i], v[i + n / 2], Lanes());
      mixed[2 * i + 1] = interleave<n / 2>(v[i], v[i + n / 2], Lanes());
    });
    unrolled<n>([&](auto i) __attribute__((always_inline)) { v[i] = mixed[i]; });
  });
  unrolled<n>([&](auto i) __attribute__((always_inline)) { std::memcpy(to + i * to_step, &v[i], sizeof(V)); });
}

// The same for any numbers of rows and columns, by squares as long as there is room for one. The last ones overlap
// those before.
template <int n, class F>
void transpose(const F* from, int64_t from_step, F* to, int64_t to_step, int64_t rows, int64_t columns) {
  if constexpr (n == 1) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < rows; ++r) to[c * to_step + r] = from[r * from_step + c];
    }
  } else {
    if (rows < n || columns < n) return transpose<n / 2>(from, from_step, to, to_step, rows, columns);
    for (int64_t i = 0; i < rows; i += n) {
      const int64_t r = std::min(i, rows - n);
      for (int64_t j = 0; j < columns; j += n) {
        const int64_t c = std::min(j, columns - n);
        transpose_square<n>(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
      }
    }
  }
}

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
