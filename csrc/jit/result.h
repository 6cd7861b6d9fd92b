// Errors as values: nothing here throws but where there is no memory, and nothing aborts the process that loaded us.
#pragma once

#include <string>
#include <utility>

namespace jax_softmax::jit {

// What went wrong, in words for the user; empty when nothing did.
struct [[nodiscard]] Error {
  std::string message;
  explicit operator bool() const { return !message.empty(); }
};

// A value, or the error that kept it from being made.
template <class T>
struct [[nodiscard]] Result {
  T value{};
  Error error;

  Result(T value) : value(std::move(value)) {}
  Result(Error error) : error(std::move(error)) {}
  explicit operator bool() const { return !error; }
};

}  // namespace jax_softmax::jit
