#include "core/call.h"

#include <algorithm>

namespace jax_softmax {

namespace {

// What is wrong with shapes and axes, or nothing.
std::string mistake_in(const Call& call) {
  const std::vector<int64_t>& shape = call.shape;
  const int rank = static_cast<int>(shape.size());
  const auto text = [](int64_t n) { return std::to_string(n); };
  if (rank > kMaxDims) {
    return "arrays of more than " + text(kMaxDims) + " dimensions are not supported, got " + text(rank);
  }
  bool is_reduced[kMaxDims] = {};
  for (const int64_t axis : call.axes) {
    if (axis < 0 || axis >= rank || is_reduced[axis]) {
      return "axes must be distinct numbers from 0 to " + text(rank - 1) + ", got " + text(axis);
    }
    is_reduced[axis] = true;
  }
  for (const int64_t extent : shape) {
    if (extent < 0) return "extents must not be negative, got " + text(extent);
  }
  const bool empty = std::count(shape.begin(), shape.end(), 0) > 0;
  int64_t elements = 1;
  for (const int64_t extent : shape) {
    if (!empty && __builtin_mul_overflow(elements, extent, &elements)) {
      return "arrays of 2^63 elements or more are not supported";
    }
  }
  for (const SideOperand& side : call.sides) {
    for (int i = 0; i < rank; ++i) {
      if (side.shape[i] != 1 && side.shape[i] != shape[i]) {
        return "dimension " + text(i) + " of an operand that broadcasts must be 1 or " + text(shape[i]) + ", got " +
               text(side.shape[i]);
      }
    }
  }
  return {};
}

// A dimension, and its stride in each side operand.
struct CanonicalDim {
  Dim dim;
  bool reduced;
  std::vector<int64_t> side_strides;

  // Whether this dimension and `inner`, the next one inside, can be one.
  bool merges_with(const CanonicalDim& inner) const {
    if (reduced != inner.reduced) return false;
    for (size_t s = 0; s < side_strides.size(); ++s) {
      if (side_strides[s] != inner.side_strides[s] * inner.dim.extent) return false;
    }
    return true;
  }
};

// The canonical dimensions, from the innermost outwards.
std::vector<CanonicalDim> canonical_dims(const Call& call) {
  const std::vector<int64_t>& shape = call.shape;
  const std::vector<SideOperand>& sides = call.sides;
  std::vector<CanonicalDim> dims;
  int64_t stride = 1;
  std::vector<int64_t> next(sides.size(), 1);  // each side operand's stride along the next dimension that it has
  for (int i = static_cast<int>(shape.size()) - 1; i >= 0; --i) {
    CanonicalDim outer{{shape[i], stride}, std::count(call.axes.begin(), call.axes.end(), i) > 0, {}};
    stride *= shape[i];
    for (size_t s = 0; s < sides.size(); ++s) {
      outer.side_strides.push_back(sides[s].shape[i] == 1 ? 0 : next[s]);
      next[s] *= sides[s].shape[i];
    }
    if (shape[i] == 1) continue;
    if (!dims.empty() && outer.merges_with(dims.back())) {
      dims.back().dim.extent *= shape[i];
    } else {
      dims.push_back(outer);
    }
  }
  return dims;
}

}  // namespace

std::string make_view(const Call& call, View* view, std::vector<SideStrides>* strides) {
  if (std::string message = mistake_in(call); !message.empty()) return message;
  *view = View{};
  strides->assign(call.sides.size(), SideStrides{});
  view->minor_reduced = true;
  const bool empty = std::count(call.shape.begin(), call.shape.end(), 0) > 0;
  std::vector<CanonicalDim> dims;
  if (!empty) dims = canonical_dims(call);
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    Dims& role = dim->reduced ? view->reduced : view->batch;
    for (size_t s = 0; s < strides->size(); ++s) {
      SideStrides& to = (*strides)[s];
      (dim->reduced ? to.reduced : to.batch)[role.size] = dim->side_strides[s];
    }
    role.dim[role.size++] = dim->dim;
    view->minor_reduced = dim->reduced;
  }
  if (view->reduced.size == 0) {  // a softmax over single elements
    view->reduced.dim[view->reduced.size++] = Dim{1, 1};
    view->minor_reduced = true;
  }
  view->rows = empty ? 0 : view->batch.elements();
  view->columns = empty ? 0 : view->reduced.elements();
  return {};
}

}  // namespace jax_softmax
