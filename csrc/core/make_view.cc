#include "core/make_view.h"

namespace jax_softmax {

std::string make_view(const std::vector<int64_t>& shape, const std::vector<std::vector<int64_t>>& sides,
                      const std::vector<int64_t>& axes, View* view, std::vector<Strides>* strides) {
  const int rank = static_cast<int>(shape.size());
  const size_t n_sides = sides.size();
  const auto text = [](int64_t n) { return std::to_string(n); };
  if (rank > kMaxDims) {
    return "arrays of more than " + text(kMaxDims) + " dimensions are not supported, got " + text(rank);
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
    if (static_cast<int>(side.size()) != rank) return "an operand that broadcasts differs in rank";
    for (int i = 0; i < rank; ++i) {
      if (side[i] != 1 && side[i] != shape[i]) {
        return "dimension " + text(i) + " of an operand that broadcasts must be 1 or " + text(shape[i]) + ", got " +
               text(side[i]);
      }
    }
  }

  Dim dims[kMaxDims];
  bool reduced[kMaxDims];
  std::vector<int64_t> side_strides[kMaxDims];  // of each side operand, along each of dims
  int first = rank;  // dims[first, rank) are the canonical dimensions, filled from the innermost outwards
  int64_t stride = 1;
  std::vector<int64_t> next(n_sides, 1);  // each side operand's stride along the next dimension that it has
  for (int i = rank - 1; i >= 0 && !empty; --i) {
    const Dim dim{shape[i], stride};
    stride *= dim.extent;
    std::vector<int64_t> along(n_sides, 0);
    for (size_t s = 0; s < n_sides; ++s) {
      if (sides[s][i] == 1) continue;
      along[s] = next[s];
      next[s] *= dim.extent;
    }
    if (dim.extent == 1) continue;
    bool merges = first < rank && reduced[first] == is_reduced[i];
    for (size_t s = 0; merges && s < n_sides; ++s) merges = along[s] == side_strides[first][s] * dims[first].extent;
    if (merges) {
      dims[first].extent *= dim.extent;
    } else {
      dims[--first] = dim;
      side_strides[first] = along;
      reduced[first] = is_reduced[i];
    }
  }

  *view = View{};
  strides->assign(n_sides, Strides{});
  view->minor_reduced = true;
  for (int i = first; i < rank; ++i) {
    Dims& role = reduced[i] ? view->reduced : view->kept;
    for (size_t s = 0; s < n_sides; ++s) {
      Strides& to = (*strides)[s];
      (reduced[i] ? to.reduced : to.kept)[role.size] = side_strides[i][s];
    }
    role.dim[role.size++] = dims[i];
    view->minor_reduced = reduced[i];
  }
  if (view->reduced.size == 0) {  // a softmax over single elements
    view->reduced.dim[view->reduced.size++] = Dim{1, 1};
    view->minor_reduced = true;
  }
  view->rows = empty ? 0 : view->kept.elements();
  view->columns = empty ? 0 : view->reduced.elements();
  return {};
}

}  // namespace jax_softmax
