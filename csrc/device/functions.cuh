// Functions for expressions: those that CUDA lacks, or whose CUDA versions take longer than memory does.
#pragma once

#include "device/pack.cuh"

namespace jax_softmax::device {

// x P(x^2) / Q(x^2), of least relative error up to kLargest, beyond which tanh is 1 up to rounding. Off by at most 5
// units in the last place. It takes one slow instruction, a reciprocal; tanh by exponentials takes two.
__device__ __forceinline__ float tanh(float x) {
  constexpr float kLargest = 7.9f;
  const float bounded = min_or_nan(max_or_nan(x, -kLargest), kLargest), square = bounded * bounded;
  float numerator = fmaf(square, 1.15318608e-5f, 2.96047539e-3f);
  numerator = fmaf(square, numerator, 0.129344195f);
  numerator = fmaf(square, numerator, 0.999999881f);
  float denominator = fmaf(square, 2.49255464e-7f, 2.40012349e-4f);
  denominator = fmaf(square, denominator, 2.38540918e-2f);
  denominator = fmaf(square, denominator, 0.462676466f);
  denominator = fmaf(square, denominator, 1.0f);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(denominator));
  return bounded * numerator * inverse;
}
__device__ __forceinline__ float tanh(int x) { return tanh(static_cast<float>(x)); }

// A float rounded to a 16-bit type.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  float low, high;
  Pair<T>::widen(low, high, Pair<T>::narrow(x, x));
  return low;
}
// bfloat16 is the upper half of a float: no shift is needed.
template <>
__device__ __forceinline__ float rounded<BFloat16>(float x) {
  return __uint_as_float(Pair<BFloat16>::narrow(0.0f, x));
}

__device__ __forceinline__ int max_or_nan(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int min_or_nan(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ int magnitude(int x) { return x < 0 ? static_cast<int>(0u - static_cast<unsigned>(x)) : x; }
__device__ __forceinline__ float sign_of(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
__device__ __forceinline__ int sign_of(int x) { return (x > 0) - (x < 0); }

}  // namespace jax_softmax::device
