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

// For elements and results of 16 bits: the product with log2(e) is off by 2^-24 of itself, so a result that is not 0 by
// at most 87 * 2^-24 of itself, which is far below that rounding.
struct Half : Scalar<float> {
  static constexpr float kLog2E = 1.44269502f;
  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }
  static __device__ __forceinline__ float exp(float x) { return exp2(x * kLog2E); }
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

namespace jax_softmax {

// Terms in one fused multiply-add and one power: exp2(x log2(e) - r), where r is pivot log2(e), rounded. What r is
// rounded by is a factor that all terms share, and `rescale` and `log` take it into account. It would overflow beyond
// 2^30, so from 2^24 on the pivot itself stands for r and x for x log2(e): 16-bit numbers that differ from such a
// pivot at all do so by 2^13 or more, and their terms are 0 either way.
template <>
struct Relative<cuda::Half> {
  using M = cuda::Half;
  static constexpr float kLarge = 1 << 24;
  float factor;
  float subtrahend;
  float pivot;

  Relative() = default;
  explicit __device__ __forceinline__ Relative(float unshielded) : pivot(shielded<M>(unshielded)) {
    factor = factor_of(pivot);
    subtrahend = __fmul_rn(pivot, factor);  // rounded, whatever it is used for
  }
  static __device__ __forceinline__ float factor_of(float pivot) { return fabsf(pivot) < kLarge ? M::kLog2E : 1.0f; }
  __device__ __forceinline__ float exp(float x) const { return M::exp2(fmaf(x, factor, -subtrahend)); }
  __device__ __forceinline__ float log(float sum) const {
    return M::log(sum) - 0.693147182f * fmaf(pivot, factor, -subtrahend);
  }
  __device__ __forceinline__ float rescale(float from) const {
    const float its_factor = factor_of(from);
    return its_factor == factor ? M::exp2(__fmul_rn(from, its_factor) - subtrahend) : 0.0f;
  }
  static __device__ __forceinline__ float divide(float x, float sum) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
    return x * inverse;
  }
};

}  // namespace jax_softmax
