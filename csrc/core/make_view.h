// From a call's shapes and axes to its view. Plain C++: no device, no XLA.
#pragma once

#include <string>
#include <vector>

#include "geometry/view.h"

namespace jax_softmax {

// `shape` and the side operands' shapes have the same rank; a side operand's entries are the shape's or 1. `axes` are
// distinct numbers in [0, rank). Sets the view and each side operand's strides along it. Returns an error message,
// empty when all is well.
std::string make_view(const std::vector<int64_t>& shape, const std::vector<std::vector<int64_t>>& sides,
                      const std::vector<int64_t>& axes, View* view, std::vector<Strides>* strides);

}  // namespace jax_softmax
