// What the handlers of all platforms do first: check the buffers and make the plan's view of them.
//
// The plan is made anew at every call, which takes about a microsecond, or found again where making it takes longer.
// XLA could keep it as state of the executable, but the layout in which a state's type is registered changed between
// the FFI versions that this package supports, and with the shape read from the buffers a program exported with
// symbolic dimensions needs nothing more.
#pragma once

#include <string>
#include <string_view>

#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_softmax {

struct Call {
  Op op;
  DType dtype;
  View view;
  const void* in[2];
  const bool* mask;
  void* out;
  void* scratch;  // null, or at least scratch_bytes
};

// Arguments: the operator's operands, of one shape and dtype, then possibly a boolean mask that broadcasts to their
// shape. Results: the operator's, then possibly a one-dimensional array to work with. `op` is one of kOpNames, `axes`
// the reduced axes.
xla::ffi::Error make_call(xla::ffi::AnyBuffer first, xla::ffi::RemainingArgs rest, xla::ffi::AnyBuffer out,
                          xla::ffi::RemainingRets more, std::string_view op, xla::ffi::Span<const int64_t> axes,
                          Call* call);

// "op of dtype[shape]", for messages.
std::string describe(std::string_view op, xla::ffi::AnyBuffer buffer);

}  // namespace jax_softmax
