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
  static __device__ __forceinline__ C reference(C pivot) { return pivot; }
  static __device__ __forceinline__ C exp_from(C x, C reference) { return ::exp(x - reference); }
  static __device__ __forceinline__ C exp_between(C from, C to) { return ::exp(from - to); }
  static __device__ __forceinline__ C log_sum(C sum, C) { return ::log(sum); }
};

// For results that are rounded to 16 bits: powers of two, relative to a reference in units of log2. A term then takes
// one multiplication with addition and one power. The reference is the pivot's product with log2(e) as it was rounded;
// whatever the rounding, it is the same for all of the row's terms and cancels against their sum.
struct Half : Scalar<float> {
  static constexpr float kLog2E = 1.44269502f, kLn2 = 0.693147182f;

  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }
  static __device__ __forceinline__ float exp(float x) { return exp2(x * kLog2E); }
  static __device__ __forceinline__ float reference(float pivot) { return pivot * kLog2E; }
  static __device__ __forceinline__ float exp_from(float x, float reference) {
    return exp2(fmaf(x, kLog2E, -reference));
  }
  static __device__ __forceinline__ float exp_between(float from, float to) { return exp2(from - to); }
  // The logarithm relative to the pivot itself, so without the reference's rounding.
  static __device__ __forceinline__ float log_sum(float sum, float pivot) {
    return logf(sum) - fmaf(pivot, kLog2E, -reference(pivot)) * kLn2;
  }
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
