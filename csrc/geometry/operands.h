// A kernel's only parameter, and the roles of its side operands.
#pragma once

#include <cstdint>

namespace jax_softmax {

// Operands that broadcast to the shape of the operator's own. Expressions read arrays and indices.
enum class Role {
  kArray,
  kIndex,   // an element's index along one dimension of the call, which no memory holds
  kNumber,  // a number of each row, which the operator takes
  kLabel,   // of each row the number of one of its elements
  kMask,    // which elements count
};

constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

// Every member is 8 bytes, so that the host fills it in as a list of words in this order: see csrc/ffi/cuda.cc.
template <int kInputs, int kSides, int kResults, int kRowResults>
struct Operands {
  const void* in[kInputs];                       // of one shape: the operator's own
  const void* side[at_least_one(kSides)];        // those that broadcast to it
  void* out[at_least_one(kResults)];             // results of elements
  void* row_results[at_least_one(kRowResults)];  // results that rows have themselves
  uint64_t* scratch;                             // memory for blocks to exchange states through, or null
  int64_t rows;
};

}  // namespace jax_softmax
