// What the handlers of all platforms do first: read the attributes and check the buffers; and last: catch.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "core/call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_softmax {

// Of the attributes that read_call reads. Exported programs hold them.
inline constexpr int64_t kCallVersion = 1;

struct CallBuffers {
  std::vector<const void*> in, side;  // null for an index
  std::vector<void*> out, of_rows;
  void* scratch = nullptr;  // null if there is none
  int64_t scratch_bytes = 0;
};

// Attributes: `version`, kCallVersion; `op`, a name in kOperators; `axes`, the reduced axes; `sides`, the roles of the
// operands that broadcast, "array", "index:D" (along dimension D of the call), "number", "label" or "mask", with spaces
// between them; `load` and `store`, as in Call.
//
// Arguments: the operator's own operands, of one shape and dtype, then the sides but for indices. Numbers are in the
// dtype of the arithmetic, labels int32, masks boolean; numbers and labels have extent 1 along the axes. Results: of
// elements, then of rows, in the dtype of the arithmetic; then possibly a one-dimensional array to work with.
// Without the results of rows these are arguments, on a CPU: numbers before the others.
xla::ffi::Error read_call(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets, xla::ffi::Dictionary attributes,
                          Call* call, CallBuffers* buffers);

// "op of an array of shape (...)", for messages.
std::string describe(const Call& call);

// The body of a handler, which returns as an error what it throws: nothing above a handler catches that, and the
// process would end.
template <class... Args>
auto returning_errors(xla::ffi::Error (*body)(Args...)) {
  return [body](Args... args) {
    try {
      return body(args...);
    } catch (const std::exception& thrown) {
      return xla::ffi::Error::Internal(std::string("jax_softmax: ") + thrown.what() + " was thrown");
    }
  };
}

// The handlers, as the addresses that the Python side registers with XLA.
void* cpu_handler();
void* cuda_initialize_handler();
void* cuda_execute_handler();

}  // namespace jax_softmax
