// What all handlers do first, read the attributes and check the buffers; and last, catch exceptions.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "core/call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_softmax {

// The version of the attributes, which exported programs hold.
inline constexpr int64_t kCallVersion = 3;

struct CallBuffers {
  std::vector<const void*> in, side;  // null for an index
  std::vector<void*> out, row_results;
  void* scratch = nullptr;  // null if there is none
  int64_t scratch_bytes = 0;
};

// The attribute `version` is kCallVersion; the others are those of `Attributes`.
xla::ffi::Error read_custom_call(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                                 xla::ffi::Dictionary attributes, Call* call, CallBuffers* buffers);

// A handler's body whose exceptions become errors: nothing above a handler catches exceptions, and the process would
// end.
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
void* attention_initialize_handler();
void* attention_execute_handler();

}  // namespace jax_softmax
