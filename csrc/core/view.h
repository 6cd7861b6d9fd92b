// The canonical view of a call's shape and axes. Plain C++: no device, no XLA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jax_softmax {

inline constexpr int kMaxDims = 12;
inline constexpr int kMostSides = 6;

// A canonical dimension: its extent, and the strides in elements of the operands and of each side operand, which
// broadcasts to their shape: 0 where it is broadcast. A mask is a side operand.
struct Dim {
  int64_t extent;
  int64_t stride;
  int64_t side[kMostSides];
};

struct Dims {
  int size = 0;
  Dim dim[kMaxDims];
  // The product of the extents.
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < size; ++i) n *= dim[i].extent;
    return n;
  }
};

// Dimensions of extent 1 dropped, neighbours of the same role merged where all side operands allow it, kept and reduced
// dimensions each listed from the outermost to the innermost.
struct View {
  Dims kept;
  Dims reduced;
  bool minor_reduced;  // whether the innermost dimension of all is a reduced one
  int64_t rows;        // product of the kept extents
  int64_t columns;     // product of the reduced extents: the length of a row
  int sides;           // side operands

  int64_t elements() const { return rows * columns; }
  bool contiguous_rows() const { return minor_reduced && reduced.size == 1; }
};

// `shape` and each of the sides' shapes have the same rank; a side's entries are the shape's or 1. `axes` are distinct
// numbers in [0, rank). Returns an error message, empty when all is well.
std::string make_view(const std::vector<int64_t>& shape, const std::vector<std::vector<int64_t>>& sides,
                      const std::vector<int64_t>& axes, View* view);

}  // namespace jax_softmax
