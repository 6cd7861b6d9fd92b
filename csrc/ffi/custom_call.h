// What all handlers do first, read the custom call; and last, catch exceptions.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "core/call.h"
#include "xla/ffi/api/ffi.h"

namespace jax_softmax {

// The version of the attributes, which exported programs hold.
inline constexpr int64_t kCallVersion = 5;

// The addresses of a custom call's operands and results.
struct Buffers {
  std::vector<void*> in, out;
};

inline xla::ffi::Error invalid(const std::string& message) {
  return xla::ffi::Error::InvalidArgument("jax_softmax: " + message);
}

// Checks that the attribute `version` is kCallVersion.
xla::ffi::Error read_buffers(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                             xla::ffi::Dictionary attributes, CustomCall* call, Buffers* buffers);

// Sets an attribute; false if there is none of this type.
bool read_attribute(xla::ffi::Dictionary attributes, const char* name, std::string* value);
bool read_attribute(xla::ffi::Dictionary attributes, const char* name, std::vector<int64_t>* value);

// Sets the operands, results and attributes of a call, a struct that adds `each` to CustomCall.
template <class Call>
xla::ffi::Error read_custom_call(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                                 xla::ffi::Dictionary attributes, Call* call, Buffers* buffers) {
  if (xla::ffi::Error error = read_buffers(args, rets, attributes, call, buffers); error.failure()) return error;
  bool complete = true;
  Call::each(*call, [&](const char* name, auto& value) { complete &= read_attribute(attributes, name, &value); });
  return complete ? xla::ffi::Error::Success() : invalid("an attribute is missing");
}

// The same of a call of an operator, with read_call.
xla::ffi::Error read_operator(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                              xla::ffi::Dictionary attributes, Call* call, Buffers* buffers);

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
