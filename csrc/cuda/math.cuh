// The policies (see ops.h) for CUDA: the arithmetic that each storage type is computed in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops.h"

namespace jax_softmax::cuda {

template <class C>
struct Scalar {
  using Value = C;
  static constexpr C kInfinity = static_cast<C>(__builtin_huge_val());
  static __device__ __forceinline__ C constant(C c) { return c; }
  static __device__ __forceinline__ bool equal(C a, C b) { return a == b; }
  static __device__ __forceinline__ C select(bool condition, C a, C b) { return condition ? a : b; }
};

// float64 and float32, with the libraries' exponentials.
template <class C>
struct Precise : Scalar<C> {
  static __device__ __forceinline__ C max(C a, C b) { return ::max(a, b); }  // ignores a NaN
  static __device__ __forceinline__ C exp(C x) { return ::exp(x); }
  static __device__ __forceinline__ C log(C x) { return ::log(x); }
};

// For results that are rounded to 16 bits: the product with log2(e) is off by 2^-24 of itself, so a result that is not
// 0 by at most 87 * 2^-24 of itself, which is far below that rounding.
struct Half : Scalar<float> {
  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float exp(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269502f));
    return power;
  }
  static __device__ __forceinline__ float log(float x) { return logf(x); }
};

template <class T>
struct Policy;
template <>
struct Policy<__half> {
  using type = Half;
};
template <>
struct Policy<__nv_bfloat16> {
  using type = Half;
};
template <>
struct Policy<float> {
  using type = Precise<float>;
};
template <>
struct Policy<double> {
  using type = Precise<double>;
};

}  // namespace jax_softmax::cuda
