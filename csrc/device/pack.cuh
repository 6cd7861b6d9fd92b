// Packs: 16 bytes of neighbouring elements, the unit in which memory is read; and their conversions to and from float.
// A pack is four words everywhere: its 16-bit elements one by one would take a register each.
#pragma once

#include "device/math.cuh"

namespace jax_softmax::device {

template <class T>
inline constexpr int kPerPack = kPackBytes / static_cast<int>(sizeof(T));

// Some neighbouring elements, as they are in memory.
constexpr int alignment_of_words(int bytes) { return bytes < 4 ? 4 : bytes < 16 ? bytes : 16; }
template <int bytes>
struct alignas(alignment_of_words(bytes)) Words {
  uint32_t word[(bytes + 3) / 4];
};
using Pack = Words<kPackBytes>;

// From global memory.
template <int bytes>
__device__ __forceinline__ Words<bytes> load_words(const void* p) {
  Words<bytes> words;
  const auto from = __cvta_generic_to_global(p);
  if constexpr (bytes == 4) {
    asm("ld.global.b32 %0, [%1];" : "=r"(words.word[0]) : "l"(from));
  } else if constexpr (bytes == 8) {
    asm("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words.word[0]), "=r"(words.word[1]) : "l"(from));
  } else {
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      asm("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
          : "=r"(words.word[4 * i]), "=r"(words.word[4 * i + 1]), "=r"(words.word[4 * i + 2]),
            "=r"(words.word[4 * i + 3])
          : "l"(from + 16 * i));
    }
  }
  return words;
}

// 16 bytes to global memory.
__device__ __forceinline__ void store_16_bytes(uint64_t to, const uint32_t (&word)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3]));
}

// 32 bytes to global memory, of which an instruction writes 16. Two neighbouring lanes first write the bytes of the
// even lane and then those of the odd one, so that each instruction writes whole sectors of the L2 cache: half sectors
// take twice the time. Lanes need not arrive together: those of __activemask() do so at the shuffles too, and a lane
// without its neighbour writes half sectors.
__device__ __forceinline__ void store_sector(uint64_t to, const uint32_t* word) {
  const unsigned active = __activemask(), pair = 3u << (threadIdx.x % 32 & ~1u);
  const bool odd = threadIdx.x & 1;
  const uint64_t others = __shfl_xor_sync(active, to, 1);
  uint32_t first[4], second[4], received[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) received[w] = __shfl_xor_sync(active, odd ? word[w] : word[4 + w], 1);
  const bool both = (active & pair) == pair;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    first[w] = both && odd ? received[w] : word[w];
    second[w] = both && !odd ? received[w] : word[4 + w];
  }
  store_16_bytes(both && odd ? others + 16 : to, first);
  store_16_bytes(both && !odd ? others : to + 16, second);
}

// To global memory. Loads may pass these stores, since no kernel reads its results. Assembly, because the compiler made
// four stores of an ordinary one in unrolled loops.
template <int bytes>
__device__ __forceinline__ void store_words(void* p, const Words<bytes>& words) {
  const auto to = __cvta_generic_to_global(p);
  if constexpr (bytes == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.word[0]), "r"(words.word[1]));
  } else if constexpr (bytes == 4) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(words.word[0]));
  } else if constexpr (bytes == 16) {
    store_16_bytes(to, words.word);
  } else {
    store_sector(to, words.word);
  }
}

// ---- the elements of a word: two of 16 bits, or a float. max ignores NaNs, max_or_nan does not.

// A function max or max_or_nan of pairs: an instruction, or f of each element.
#if __CUDA_ARCH__ >= 800
#define JAX_SOFTMAX_OF_PAIRS(name, f, instruction)                          \
  static __device__ __forceinline__ uint32_t name(uint32_t a, uint32_t b) { \
    uint32_t word;                                                          \
    asm(instruction " %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));          \
    return word;                                                            \
  }
#else
#define JAX_SOFTMAX_OF_PAIRS(name, f, instruction)                          \
  static __device__ __forceinline__ uint32_t name(uint32_t a, uint32_t b) { \
    float al, ah, bl, bh;                                                   \
    widen(al, ah, a);                                                       \
    widen(bl, bh, b);                                                       \
    return narrow(f(al, bl), f(ah, bh));                                    \
  }
#endif

template <class T>
struct Pair;

template <>
struct Pair<BFloat16> {
  static __device__ __forceinline__ void widen(float& low, float& high, uint32_t word) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t narrow(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return rounded(low) | rounded(high) << 16;
#endif
  }
  JAX_SOFTMAX_OF_PAIRS(max, fmaxf, "max.bf16x2")
  JAX_SOFTMAX_OF_PAIRS(max_or_nan, device::max_or_nan, "max.NaN.bf16x2")

 private:
  // To nearest even, where the chip has no instruction for it.
  static __device__ __forceinline__ uint32_t rounded(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  }
};

template <>
struct Pair<Float16> {
  static __device__ __forceinline__ void widen(float& low, float& high, uint32_t word) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(low), "=f"(high)
        : "r"(word));
  }
  static __device__ __forceinline__ uint32_t narrow(float low, float high) {
    uint32_t word;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(word)
        : "f"(low), "f"(high));
#endif
    return word;
  }
  JAX_SOFTMAX_OF_PAIRS(max, fmaxf, "max.f16x2")
  JAX_SOFTMAX_OF_PAIRS(max_or_nan, device::max_or_nan, "max.NaN.f16x2")
};
#undef JAX_SOFTMAX_OF_PAIRS

template <class T>
struct InWord : Pair<T> {};
template <>
struct InWord<float> {
  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ uint32_t max_or_nan(uint32_t a, uint32_t b) {
    return __float_as_uint(device::max_or_nan(__uint_as_float(a), __uint_as_float(b)));
  }
};

// ---- widen, narrow: between n elements and their words in memory. Of 16 bits:

template <class T>
struct Elements {
  template <int n>
  static __device__ __forceinline__ void widen(float (&v)[n], const Words<2 * n>& words) {
#pragma unroll
    for (int w = 0; w < n / 2; ++w) Pair<T>::widen(v[2 * w], v[2 * w + 1], words.word[w]);
  }
  template <int n>
  static __device__ __forceinline__ Words<2 * n> narrow(const float (&v)[n]) {
    Words<2 * n> words;
#pragma unroll
    for (int w = 0; w < n / 2; ++w) words.word[w] = Pair<T>::narrow(v[2 * w], v[2 * w + 1]);
    return words;
  }
  static __device__ __forceinline__ float widen(T x) {
    float low, high;
    Pair<T>::widen(low, high, x.bits);
    return low;
  }
  static __device__ __forceinline__ T narrow(float x) { return {static_cast<uint16_t>(Pair<T>::narrow(x, 0.0f))}; }
};

template <>
struct Elements<float> {
  template <int n>
  static __device__ __forceinline__ void widen(float (&v)[n], const Words<4 * n>& words) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = __uint_as_float(words.word[i]);
  }
  template <int n>
  static __device__ __forceinline__ Words<4 * n> narrow(const float (&v)[n]) {
    Words<4 * n> words;
#pragma unroll
    for (int i = 0; i < n; ++i) words.word[i] = __float_as_uint(v[i]);
    return words;
  }
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float narrow(float x) { return x; }
};

// Of 8 bits: read from side operands, and written as results of operators that quantize. These are within the type's
// range or NaN (0 as an integer), and are rounded to nearest, ties to even.
template <class Format>
struct Elements<Byte<Format>> {
  template <int n>
  static __device__ __forceinline__ void widen(float (&v)[n], const Words<n>& words) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = value(words.word[i / 4] >> (8 * (i % 4)) & 0xffu);
  }
  static __device__ __forceinline__ float widen(Byte<Format> x) { return value(x.bits); }
  template <int n>
  static __device__ __forceinline__ Words<n> narrow(const float (&v)[n]) {
    Words<n> words;
#pragma unroll
    for (int i = 0; i < n; i += 4) words.word[i / 4] = four(v[i], v[i + 1], v[i + 2], v[i + 3]);
    return words;
  }
  static __device__ __forceinline__ Byte<Format> narrow(float x) {
    return {static_cast<uint8_t>(four(x, 0.0f, 0.0f, 0.0f))};
  }

 private:
  // A word of four elements, the first in its last byte.
  static __device__ __forceinline__ uint32_t four(float a, float b, float c, float d) {
    if constexpr (kIsSame<Format, int8_t>) {
      return packed(__float2int_rn(a), __float2int_rn(b), packed(__float2int_rn(c), __float2int_rn(d), 0));
    } else {
#if __CUDA_ARCH__ >= 890
      return two(a, b) | two(c, d) << 16;
#else
      return Format::narrow(a) | Format::narrow(b) << 8 | Format::narrow(c) << 16 | Format::narrow(d) << 24;
#endif
    }
  }
  static __device__ __forceinline__ uint32_t packed(int first, int second, uint32_t rest) {
    uint32_t word;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(second), "r"(first), "r"(rest));
    return word;
  }
  static __device__ __forceinline__ uint32_t two(float first, float second) {
    uint16_t pair;
    if constexpr (kIsSame<Format, E4M3>) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    }
    return pair;
  }
  // An integer becomes the last bits of the float 2^23: a conversion takes longer.
  static __device__ __forceinline__ float value(uint32_t byte) {
    constexpr uint32_t k2To23 = 0x4b000000u;
    if constexpr (kIsSame<Format, int8_t>) {
      return __uint_as_float(k2To23 | (byte ^ 0x80u)) - (8388608.0f + 128.0f);
    } else if constexpr (kIsSame<Format, uint8_t>) {
      return __uint_as_float(k2To23 | byte) - 8388608.0f;
    } else {
      return Format::widen(byte);
    }
  }
};

// Of side operands alone.
template <>
struct Elements<Int32> {
  template <int n>
  static __device__ __forceinline__ void widen(int (&v)[n], const Words<4 * n>& words) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = static_cast<int>(words.word[i]);
  }
  static __device__ __forceinline__ int widen(Int32 x) { return x.bits; }
};

template <>
struct Elements<Bool> {
  template <int n>
  static __device__ __forceinline__ void widen(bool (&v)[n], const Words<n>& words) {
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = words.word[i / 4] >> (8 * (i % 4)) & 1;
  }
  static __device__ __forceinline__ bool widen(Bool x) { return x.bits != 0; }
};

// The lowest bit of each byte.
template <int bytes>
__device__ __forceinline__ unsigned bits_of_bytes(const Words<bytes>& words) {
  unsigned bits = 0;
#pragma unroll
  for (int w = 0; w < (bytes + 3) / 4; ++w) {
    // The multiplication moves the bit of byte i to bit 24 + i; its other products are at other bits, one each.
    bits |= ((words.word[w] & 0x01010101u) * 0x01020408u >> 24 & 0xfu) << (4 * w);
  }
  return bits;
}

// ---- parts of packs; bit i of `bits` stands for element i

template <class T>
inline constexpr unsigned kAllBits = (1u << kPerPack<T>)-1;

// The elements of a pack that are in [0, size), where its elements are numbered from `first` on.
template <class T, class Index>
__device__ __forceinline__ unsigned bits_within(Index first, Index size) {
  constexpr int kWidth = kPerPack<T>;
  unsigned bits = kAllBits<T>;
  if (first < 0) bits &= kAllBits<T> << (first > -kWidth ? -static_cast<int>(first) : kWidth);
  if (first + kWidth > size) bits &= first < size ? kAllBits<T> >> static_cast<int>(first + kWidth - size) : 0;
  return bits;
}

// The bits of word w that belong to the given elements.
template <class T>
__device__ __forceinline__ uint32_t word_mask(unsigned bits, int w) {
  if constexpr (sizeof(T) == 2) {
    return ((bits >> (2 * w)) & 1 ? 0xffffu : 0u) | ((bits >> (2 * w + 1)) & 1 ? 0xffff0000u : 0u);
  } else {
    return (bits >> w) & 1 ? ~0u : 0u;
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

// The elementwise maximum. NaNs are ignored, or not.
template <class T, bool kOrNan>
__device__ __forceinline__ Pack max_of_packs(const Pack& a, const Pack& b) {
  Pack m;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    m.word[w] = kOrNan ? InWord<T>::max_or_nan(a.word[w], b.word[w]) : InWord<T>::max(a.word[w], b.word[w]);
  }
  return m;
}

// A pack without the signs of its elements.
template <class T>
__device__ __forceinline__ Pack magnitudes(const Pack& pack) {
  Pack result;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    result.word[w] = pack.word[w] & (sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu);
  }
  return result;
}

// An unsigned integer of as many bytes as T.
template <class T>
using BitsOf =
    typename Conditional<sizeof(T) == 1, uint8_t, typename Conditional<sizeof(T) == 2, uint16_t, uint32_t>::type>::type;

// Reads elements one by one.
template <class T>
__device__ __forceinline__ Pack load_elements(const T* p, unsigned bits) {
  constexpr int kOfWord = 4 / static_cast<int>(sizeof(T));
  const auto* from = reinterpret_cast<const BitsOf<T>*>(p);
  Pack pack{};
#pragma unroll
  for (int i = 0; i < kPerPack<T>; ++i) {
    if ((bits >> i) & 1) pack.word[i / kOfWord] |= static_cast<uint32_t>(from[i]) << (32 / kOfWord * (i % kOfWord));
  }
  return pack;
}

// Writes elements one by one.
template <class T, int bytes>
__device__ __forceinline__ void store_elements(T* p, const Words<bytes>& words, unsigned bits) {
  constexpr int kOfWord = 4 / static_cast<int>(sizeof(T));
  auto* to = reinterpret_cast<BitsOf<T>*>(p);
#pragma unroll
  for (int i = 0; i < bytes / static_cast<int>(sizeof(T)); ++i) {
    if ((bits >> i) & 1) to[i] = static_cast<BitsOf<T>>(words.word[i / kOfWord] >> (32 / kOfWord * (i % kOfWord)));
  }
}

}  // namespace jax_softmax::device
