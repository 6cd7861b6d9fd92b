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

inline constexpr float kLog2E = 1.44269502f;         // log2(e), rounded to float
inline constexpr float kLog2ELow = 1.92596303e-8f;   // the rest of it
inline constexpr float kLn2 = 0.693147182f;

struct FloatBase : Scalar<float> {
  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }  // ignores a NaN
  static __device__ __forceinline__ float log(float x) { return logf(x); }
};

// For results that are rounded to 16 bits: the error of the product with log2(e) is at most 87 * 2^-24 of a result
// that is not 0.
struct FloatForHalf : FloatBase {
  static __device__ __forceinline__ float exp(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2E));
    return result;
  }
};

// exp(x) = 2^h (1 + l ln(2)), where h + l is the product with log2(e) to twice the precision: the error does not grow
// with |x|. Both infinities leave l undefined, hence the select on h.
struct FloatForFloat : FloatBase {
  static __device__ __forceinline__ float exp(float x) {
    const float high = x * kLog2E;
    const float low = fmaf(x, kLog2ELow, fmaf(x, kLog2E, -high));
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(high));
    return fabsf(high) < kInfinity ? fmaf(power, low * kLn2, power) : power;
  }
};

struct Double : Scalar<double> {
  static __device__ __forceinline__ double max(double a, double b) { return fmax(a, b); }
  static __device__ __forceinline__ double exp(double x) { return ::exp(x); }
  static __device__ __forceinline__ double log(double x) { return ::log(x); }
};

template <class T>
struct Policy;
template <>
struct Policy<__half> {
  using type = FloatForHalf;
};
template <>
struct Policy<__nv_bfloat16> {
  using type = FloatForHalf;
};
template <>
struct Policy<float> {
  using type = FloatForFloat;
};
template <>
struct Policy<double> {
  using type = Double;
};

}  // namespace jax_softmax::cuda
