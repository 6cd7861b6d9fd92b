// What the handlers of all platforms do first: check the buffers and make the view of them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/make_view.h"
#include "core/op.h"
#include "xla/ffi/api/ffi.h"

namespace jax_softmax {

inline constexpr int kMostSides = 6;

// What a call is, but for where its operands lie.
struct CallShape {
  Op op;
  DType in, out;
  std::vector<int64_t> shape, axes;
  // The shapes of the operands that broadcast, at the same rank: what is fused reads, then what rows have of their own,
  // then the mask.
  std::vector<std::vector<int64_t>> sides;
  std::vector<DType> side_types;  // of those that are read by what is fused
  bool masked;                    // whether the last of them is a mask
  std::string fused;              // see plan/source.h
};

struct CallBuffers {
  const void* in[2];
  const void* side[kMostSides];
  void* out;                       // null if there are no results for elements
  void* of_rows[kMostRowResults];  // the results of rows
  void* scratch;                   // null if there is none
  int64_t scratch_bytes;
};

// Arguments: the operator's operands, of one shape and dtype, then operands that broadcast to their shape: what is
// fused reads, then what rows have of their own, of extent 1 along the axes: numbers in the dtype of the arithmetic, or
// int32 labels; then possibly a boolean mask. Results: of the elements, then of the rows, in the dtype of the
// arithmetic, as far as the operator has any; then possibly a one-dimensional array to work with. `op` is a name in
// kOperators, `axes` the reduced axes.
xla::ffi::Error read_call(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, std::string_view op,
                          xla::ffi::Span<const int64_t> axes, std::string_view fused, CallShape* shape,
                          CallBuffers* buffers);

// The shape of what rows have, of the rank of the operands: with extent 1 along the axes.
std::vector<int64_t> shape_of_rows(const CallShape& call);

// "op of an array of shape (...)", for messages.
std::string describe(const CallShape& call);

// The handlers, as the addresses that the Python side registers with XLA.
void* cpu_handler();
void* cuda_initialize_handler();
void* cuda_execute_handler();

}  // namespace jax_softmax
