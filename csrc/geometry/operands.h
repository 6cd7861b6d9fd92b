// What a kernel is given: its only parameter, and what the operands beside the operator's own are.
#pragma once

#include <cstdint>

namespace jax_softmax {

// Operands that broadcast to the shape of the operator's own. Expressions read arrays and indices.
enum class Role {
  kArray,
  kIndex,   // an element's number along one dimension of the call; there is no memory behind it
  kNumber,  // one number for each row, which the operator takes
  kLabel,   // for each row the number of one of its elements
  kMask,    // which elements count
};

constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

// Every member is 8 bytes, so that the host fills it in as a list of words in this order: see csrc/ffi/cuda.cc.
template <int inputs, int sides, int results, int row_results>
struct Operands {
  const void* in[inputs];                    // of one shape: the operator's own
  const void* side[at_least_one(sides)];     // those that broadcast to it
  void* out[at_least_one(results)];          // results of elements
  void* of_rows[at_least_one(row_results)];  // results that rows have themselves
  uint64_t* words;                           // memory for blocks to exchange states through, or null
  int64_t rows;
};

}  // namespace jax_softmax
