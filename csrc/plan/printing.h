// How the sources of kernels are printed.
#pragma once

#include <string>

#include "core/gpu.h"
#include "core/op.h"

namespace jax_softmax {

// A number as C++.
std::string number(int64_t n);

// The type of an element in device/types.cuh.
std::string type_of(DType type);

// A static member.
std::string constant(const std::string& type, const std::string& name, const std::string& value);
template <class T>
std::string constant(const std::string& name, T value) {
  return constant(sizeof(T) == 1 ? "bool" : sizeof(T) == 8 ? "int64_t" : "int", name, number(value));
}

// The end of a source, from the end of its namespace on: the kernel of a launch. `operands`: its parameter's type.
std::string kernel_of(const Launch& launch, const std::string& operands, const std::string& body);

}  // namespace jax_softmax
