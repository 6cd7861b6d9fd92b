// The device code, as text inside the library. The table is generated at build time by embed_headers.cmake.
#pragma once

#include <cstddef>

namespace jax_softmax::jit {

// What kernels include: file i is found under kHeaderNames[i].
extern const char* const kHeaderNames[];
extern const char* const kHeaderTexts[];
extern const int kHeaders;

}  // namespace jax_softmax::jit
