// 16 bytes of neighbouring elements, the unit in which memory is read and written, and the conversions to and from the
// type of the arithmetic.
#pragma once

#include <cstdint>

#include "cuda/math.cuh"

namespace jax_softmax::cuda {

inline constexpr int kPackBytes = 16;

template <class T>
inline constexpr int kPerPack = kPackBytes / static_cast<int>(sizeof(T));

template <class T>
struct alignas(kPackBytes) Pack {
  T element[kPerPack<T>];
};

template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) {
  const uint4 bits = *reinterpret_cast<const uint4*>(p);
  return reinterpret_cast<const Pack<T>&>(bits);
}

template <class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& pack) {
  *reinterpret_cast<uint4*>(p) = reinterpret_cast<const uint4&>(pack);
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T, class C>
__device__ __forceinline__ T narrow(C x) {
  if constexpr (sizeof(T) == sizeof(C)) {
    return x;
  } else if constexpr (sizeof(T) == 2) {
    if constexpr (__is_same(T, __half)) {
      return __float2half_rn(x);
    } else {
      return __float2bfloat16_rn(x);
    }
  }
}

template <class T, class C>
__device__ __forceinline__ Pack<T> narrow_pack(const C (&values)[kPerPack<T>]) {
  Pack<T> pack;
  if constexpr (sizeof(T) == 2) {  // two at a time is one instruction
#pragma unroll
    for (int i = 0; i < kPerPack<T>; i += 2) {
      if constexpr (__is_same(T, __half)) {
        reinterpret_cast<__half2&>(pack.element[i]) = __floats2half2_rn(values[i], values[i + 1]);
      } else {
        reinterpret_cast<__nv_bfloat162&>(pack.element[i]) = __floats2bfloat162_rn(values[i], values[i + 1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerPack<T>; ++i) pack.element[i] = values[i];
  }
  return pack;
}

}  // namespace jax_softmax::cuda
