#include "core/view.h"

#include <algorithm>
#include <iterator>

namespace jax_softmax {

std::string make_view(const std::vector<int64_t>& shape, const std::vector<std::vector<int64_t>>& sides,
                      const std::vector<int64_t>& axes, View* view) {
  const int rank = static_cast<int>(shape.size()), n_sides = static_cast<int>(sides.size());
  const auto text = [](int64_t n) { return std::to_string(n); };
  if (rank > kMaxDims) {
    return "arrays of more than " + text(kMaxDims) + " dimensions are not supported, got " + text(rank);
  }
  if (n_sides > kMostSides) {
    return "more than " + text(kMostSides) + " operands that broadcast are not supported, got " + text(n_sides);
  }
  bool is_reduced[kMaxDims] = {};
  for (const int64_t axis : axes) {
    if (axis < 0 || axis >= rank || is_reduced[axis]) {
      return "axes must be distinct numbers from 0 to " + text(rank - 1) + ", got " + text(axis);
    }
    is_reduced[axis] = true;
  }
  int64_t elements = 1;
  bool empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return "extents must not be negative, got " + text(extent);
    empty |= extent == 0;
  }
  for (const int64_t extent : shape) {
    if (!empty && __builtin_mul_overflow(elements, extent, &elements)) {
      return "arrays of 2^63 elements or more are not supported";
    }
  }
  for (const auto& side : sides) {
    if (static_cast<int>(side.size()) != rank) return "the mask differs in rank";
    for (int i = 0; i < rank; ++i) {
      if (side[i] != 1 && side[i] != shape[i]) {
        return "dimension " + text(i) + " of the mask must be 1 or " + text(shape[i]) + ", got " + text(side[i]);
      }
    }
  }

  Dim dims[kMaxDims];
  bool reduced[kMaxDims];
  int first = rank;  // dims[first, rank) are the canonical dimensions, filled from the innermost outwards
  int64_t stride = 1, side_stride[kMostSides];
  std::fill(std::begin(side_stride), std::end(side_stride), 1);
  for (int i = rank - 1; i >= 0 && !empty; --i) {
    Dim dim{shape[i], stride, {}};
    stride *= dim.extent;
    for (int s = 0; s < n_sides; ++s) {
      if (sides[s][i] == 1) continue;
      dim.side[s] = side_stride[s];
      side_stride[s] *= dim.extent;
    }
    if (dim.extent == 1) continue;
    bool merges = first < rank && reduced[first] == is_reduced[i];
    for (int s = 0; merges && s < n_sides; ++s) merges = dim.side[s] == dims[first].side[s] * dims[first].extent;
    if (merges) {
      dims[first].extent *= dim.extent;
    } else {
      dims[--first] = dim;
      reduced[first] = is_reduced[i];
    }
  }

  *view = View{};
  view->sides = n_sides;
  view->minor_reduced = true;
  for (int i = first; i < rank; ++i) {
    Dims& role = reduced[i] ? view->reduced : view->kept;
    role.dim[role.size++] = dims[i];
    view->minor_reduced = reduced[i];
  }
  if (view->reduced.size == 0) {  // a softmax over single elements
    view->reduced.dim[view->reduced.size++] = Dim{1, 1, {}};
    view->minor_reduced = true;
  }
  view->rows = empty ? 0 : view->kept.elements();
  view->columns = empty ? 0 : view->reduced.elements();
  return {};
}

}  // namespace jax_softmax
