// 16 bytes of neighbouring elements, the unit in which memory is read and written, and the conversions to and from the
// type of the arithmetic. A pack is four words throughout: single 16-bit elements of it would cost a register each.
#pragma once

#include <cstdint>

#include "cuda/math.cuh"
#include "plan.h"

namespace jax_softmax::cuda {

template <class T>
inline constexpr int kPerPack = kPackBytes / static_cast<int>(sizeof(T));

struct alignas(kPackBytes) Pack {
  uint32_t word[4];
};

__device__ __forceinline__ Pack load_pack(const void* p) {
  const uint4 bits = *static_cast<const uint4*>(p);
  return {{bits.x, bits.y, bits.z, bits.w}};
}

// To global memory. In unrolled loops the compiler has been seen to make four stores of an ordinary one.
__device__ __forceinline__ void store_pack(void* p, const Pack& pack) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(pack.word[0]),
               "r"(pack.word[1]), "r"(pack.word[2]), "r"(pack.word[3])
               : "memory");
}

// ---- between a pack and its elements as they are computed with

// Two elements of 16 bits in a word.
template <class T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ void widen(float& low, float& high, uint32_t word) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t narrow(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    const __nv_bfloat162 larger =
        __hmax2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(larger);
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ void widen(float& low, float& high, uint32_t word) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    low = pair.x;
    high = pair.y;
  }
  static __device__ __forceinline__ uint32_t narrow(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    const __half2 larger = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(larger);
  }
};

// widen, narrow: between a pack and its elements. max: element by element, a NaN being ignored. Of 16 bits:
template <class T>
struct Elements {
  static __device__ __forceinline__ void widen(float (&v)[8], const Pack& pack) {
#pragma unroll
    for (int w = 0; w < 4; ++w) Pair<T>::widen(v[2 * w], v[2 * w + 1], pack.word[w]);
  }
  static __device__ __forceinline__ Pack narrow(const float (&v)[8]) {
    Pack pack;
#pragma unroll
    for (int w = 0; w < 4; ++w) pack.word[w] = Pair<T>::narrow(v[2 * w], v[2 * w + 1]);
    return pack;
  }
  static __device__ __forceinline__ Pack max(const Pack& a, const Pack& b) {
    Pack m;
#pragma unroll
    for (int w = 0; w < 4; ++w) m.word[w] = Pair<T>::max(a.word[w], b.word[w]);
    return m;
  }
  static __device__ __forceinline__ float widen(T x) { return static_cast<float>(x); }
  static __device__ __forceinline__ T narrow(float x) { return static_cast<T>(x); }
};

template <>
struct Elements<float> {
  static __device__ __forceinline__ void widen(float (&v)[4], const Pack& pack) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(pack.word[i]);
  }
  static __device__ __forceinline__ Pack narrow(const float (&v)[4]) {
    return {{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])}};
  }
  static __device__ __forceinline__ Pack max(const Pack& a, const Pack& b) {
    Pack m;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      m.word[i] = __float_as_uint(fmaxf(__uint_as_float(a.word[i]), __uint_as_float(b.word[i])));
    return m;
  }
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float narrow(float x) { return x; }
};

template <>
struct Elements<double> {
  static __device__ __forceinline__ void widen(double (&v)[2], const Pack& pack) {
#pragma unroll
    for (int i = 0; i < 2; ++i) v[i] = __hiloint2double(pack.word[2 * i + 1], pack.word[2 * i]);
  }
  static __device__ __forceinline__ Pack narrow(const double (&v)[2]) {
    return {{static_cast<uint32_t>(__double2loint(v[0])), static_cast<uint32_t>(__double2hiint(v[0])),
             static_cast<uint32_t>(__double2loint(v[1])), static_cast<uint32_t>(__double2hiint(v[1]))}};
  }
  static __device__ __forceinline__ Pack max(const Pack& a, const Pack& b) {
    double va[2], vb[2];
    widen(va, a);
    widen(vb, b);
    const double m[2] = {fmax(va[0], vb[0]), fmax(va[1], vb[1])};
    return narrow(m);
  }
  static __device__ __forceinline__ double widen(double x) { return x; }
  static __device__ __forceinline__ double narrow(double x) { return x; }
};

// ---- parts of packs; bit i of `bits` stands for element i

template <class T>
inline constexpr unsigned kAllBits = (1u << kPerPack<T>)-1;

// The bits of word w that belong to the given elements.
template <class T>
__device__ __forceinline__ uint32_t word_mask(unsigned bits, int w) {
  if constexpr (sizeof(T) == 2) {
    return ((bits >> (2 * w)) & 1 ? 0xffffu : 0u) | ((bits >> (2 * w + 1)) & 1 ? 0xffff0000u : 0u);
  } else {
    return (bits >> (sizeof(T) == 4 ? w : w / 2)) & 1 ? ~0u : 0u;
  }
}

// `pack` with the elements not in `bits` replaced by those of `other`.
template <class T>
__device__ __forceinline__ Pack select_elements(unsigned bits, const Pack& pack, const Pack& other) {
  Pack result;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t mask = word_mask<T>(bits, w);
    result.word[w] = (pack.word[w] & mask) | (other.word[w] & ~mask);
  }
  return result;
}

// Reads elements one by one.
template <class T>
__device__ __forceinline__ Pack load_elements(const T* p, unsigned bits) {
  Pack pack{};
  if constexpr (sizeof(T) == 2) {
    const auto* half = reinterpret_cast<const uint16_t*>(p);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((bits >> i) & 1) pack.word[i / 2] |= static_cast<uint32_t>(half[i]) << (16 * (i % 2));
    }
  } else {
    const auto* word = reinterpret_cast<const uint32_t*>(p);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (word_mask<T>(bits, w)) pack.word[w] = word[w];
    }
  }
  return pack;
}

// Writes elements one by one.
template <class T>
__device__ __forceinline__ void store_elements(T* p, const Pack& pack, unsigned bits) {
  if constexpr (sizeof(T) == 2) {
    auto* half = reinterpret_cast<uint16_t*>(p);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((bits >> i) & 1) half[i] = static_cast<uint16_t>(pack.word[i / 2] >> (16 * (i % 2)));
    }
  } else {
    auto* word = reinterpret_cast<uint32_t*>(p);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (word_mask<T>(bits, w)) word[w] = pack.word[w];
    }
  }
}

}  // namespace jax_softmax::cuda
