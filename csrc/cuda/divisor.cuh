// Division by numbers that only the host knows in time.
#pragma once

#include <cstdint>

namespace jax_softmax::cuda {

// Division of numbers below 2^31: Granlund & Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
  unsigned divisor, factor, shift;

  Divisor() = default;
  explicit Divisor(int64_t d) : divisor(static_cast<unsigned>(d < INT32_MAX ? d : INT32_MAX)), factor(0), shift(0) {
    if (divisor <= 1) return;
    int bits = 0;
    while ((1u << bits) < divisor) ++bits;
    factor = static_cast<unsigned>(((uint64_t{1} << (31 + bits)) + divisor - 1) / divisor);
    shift = bits - 1;
  }
  __device__ __forceinline__ unsigned divide(unsigned n) const {
    return divisor <= 1 ? n : __umulhi(n, factor) >> shift;
  }
};

}  // namespace jax_softmax::cuda
