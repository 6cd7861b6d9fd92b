// The canonical view of a call's shape and axes, for planning and, as a constant, for the kernel.
#pragma once

#include <cstdint>

namespace jax_softmax {

inline constexpr int kMaxDims = 12;

// A canonical dimension: its extent, and how many elements apart its neighbours lie.
struct Dim {
  int64_t extent;
  int64_t stride;
};

struct Dims {
  int size;
  Dim dim[kMaxDims];

  // The product of the extents.
  constexpr int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < size; ++i) n *= dim[i].extent;
    return n;
  }
  constexpr const Dim& innermost() const { return dim[size - 1]; }
};

// Dimensions of extent 1 dropped, neighbours of the same role merged where all side operands allow it, kept and reduced
// dimensions each listed from the outermost to the innermost. For a kernel the outermost kept extent and the rows are
// 0, so that all batch sizes share it.
struct View {
  Dims kept;
  Dims reduced;
  bool minor_reduced;  // whether the innermost dimension of all is a reduced one
  int64_t rows;        // product of the kept extents
  int64_t columns;     // product of the reduced extents: the length of a row

  constexpr int64_t elements() const { return rows * columns; }
  constexpr bool contiguous_rows() const { return minor_reduced && reduced.size == 1; }
};

// How many elements apart a side operand's neighbours lie along the dimensions of a view: 0 where it is broadcast.
struct Strides {
  int64_t kept[kMaxDims];
  int64_t reduced[kMaxDims];
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace jax_softmax
