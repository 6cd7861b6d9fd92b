// Small things of the standard library that NVRTC comes without.
#pragma once

#include <cstdint>

#include "geometry/view.h"

namespace jax_softmax::device {

template <class A, class B>
inline constexpr bool kIsSame = false;
template <class A>
inline constexpr bool kIsSame<A, A> = true;

template <bool condition, class A, class B>
struct Conditional {
  using type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using type = B;
};

}  // namespace jax_softmax::device
