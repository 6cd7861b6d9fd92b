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
  void* out;                                  // null if there are no results for elements
  void* row_results[kMostRowResultsOnCpu];    // the results of rows; null beyond their number
  const void* numbers[kMostRowNumbersOnCpu];  // the rows' numbers; null beyond their number
  const int32_t* labels;                      // of rows; null for operators without labels
};

// Units 0 to units - 1 can run in any order on any thread. If they need scratch memory, aligned to kScratchAlignment,
// they run twice: the second phase begins when all units have ended the first.
struct Work {
  int64_t units;
  int64_t scratch_bytes;
};
inline constexpr int kScratchAlignment = 64;

// Whether there are kernels with results of type `out`.
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

// The variant in use: the fastest that is supported, until another one is selected.
const Variant& variant();
void select(const Variant& variant);

}  // namespace jax_softmax::cpu
