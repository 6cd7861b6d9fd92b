// The CPU kernels: compiled for several instruction sets, one of which is chosen at run time.
#pragma once

#include <cstdint>

#include "core/op.h"
#include "geometry/view.h"

namespace jax_softmax::cpu {

struct Buffers {
  const void* in[2];
  const bool* mask;  // null without a mask
  SideStrides mask_strides;
  void* out;                                            // null if there are no results for elements
  void* row_results[kMostRowResultsOnCpu];              // the results of rows, null from their number on
  const void* known_row_results[kMostRowResultsOnCpu];  // the results of rows, where they are known; else null
  const void* numbers[kMostRowNumbersOnCpu];            // those that rows have of their own, null from their number on
  const int32_t* labels;                                // of rows; null of operators without
};

// Work comes in units, numbered from 0, that can run in any order on any thread. If it needs scratch memory, aligned to
// kScratchAlignment, it comes in two phases: the second one of the same units begins when all of the first are done.
struct Work {
  int64_t units;
  int64_t scratch_bytes;
};
inline constexpr int kScratchAlignment = 64;

// Whether there are results of type `out`, of operators that have them for elements at all.
constexpr bool makes(DType in, DType out) { return in == out || (out == DType::kI8 && in != DType::kF64); }

struct Variant {
  const char* name;
  bool (*supported)();  // by the processor this runs on
  Work (*work)(Op op, DType in, DType out, const View& view, const Buffers& buffers, int64_t threads);
  void (*run)(Op op, DType in, DType out, const View& view, const Buffers& buffers, void* scratch, bool second_phase,
              int64_t first_unit, int64_t last_unit);
};

// Compiled-in variants, the fastest first; the last one is supported everywhere.
extern const Variant kVariants[];
extern const int kVariantCount;

// The variant that runs here: the fastest that is supported, until another one is to be used.
const Variant& variant();
void select(const Variant& variant);

}  // namespace jax_softmax::cpu
