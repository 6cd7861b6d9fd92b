// Arrays of two dimensions, transposed by squares of vectors.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/simd.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

template <int first, class V, int... j>
JAX_SOFTMAX_INLINE V interleave(V a, V b, std::integer_sequence<int, j...>) {
  return __builtin_shufflevector(a, b, (first + j / 2 + j % 2 * static_cast<int>(sizeof...(j)))...);
}

// Writes to[c * to_stride + r] = from[r * from_stride + c] for r and c below n, a power of 2.
template <int n, class T>
JAX_SOFTMAX_INLINE void transpose_square(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  using Bits = std::conditional_t<
      sizeof(T) == 1, uint8_t,
      std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
  using V = Vector<Bits, n>;
  using Lanes = std::make_integer_sequence<int, n>;
  V v[n], mixed[n];
  unrolled<n>([&](auto i) __attribute__((always_inline)) { std::memcpy(&v[i], from + i * from_stride, sizeof(V)); });
  unrolled<__builtin_ctz(n)>([&](auto) __attribute__((always_inline)) {
    unrolled<n / 2>([&](auto i) __attribute__((always_inline)) {
      mixed[2 * i] = interleave<0>(v[i], v[i + n / 2], Lanes());
      mixed[2 * i + 1] = interleave<n / 2>(v[i], v[i + n / 2], Lanes());
    });
    unrolled<n>([&](auto i) __attribute__((always_inline)) { v[i] = mixed[i]; });
  });
  unrolled<n>([&](auto i) __attribute__((always_inline)) { std::memcpy(to + i * to_stride, &v[i], sizeof(V)); });
}

// The same for any numbers of rows and columns, by squares where they fit. The last squares overlap those before.
template <int n, class T>
void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns) {
  if constexpr (n == 1 || n * sizeof(T) < 8) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
    }
  } else {
    if (rows < n || columns < n) return transpose<n / 2>(from, from_stride, to, to_stride, rows, columns);
    for (int64_t i = 0; i < rows; i += n) {
      const int64_t r = std::min(i, rows - n);
      for (int64_t j = 0; j < columns; j += n) {
        const int64_t c = std::min(j, columns - n);
        transpose_square<n>(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
      }
    }
  }
}

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
