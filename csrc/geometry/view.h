// The canonical view of a call's shape and axes, for planning and, as a constant, for the kernel.
#pragma once

#include <cstdint>

namespace jax_softmax {

inline constexpr int kMaxDims = 12;
inline constexpr int kPackBytes = 16;  // what memory is read and written by

// A canonical dimension. The stride is in elements.
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

// A shape and its reduced axes, in canonical form: dimensions of extent 1 dropped, neighbours of the same role merged
// where all side operands allow it, batch and reduced dimensions each listed from the outermost to the innermost. For a
// kernel the outermost batch extent and the rows are 0, so that all batch sizes share it.
struct View {
  Dims batch;
  Dims reduced;
  bool minor_reduced;  // whether the innermost dimension of the array is a reduced one
  int64_t rows;        // product of the batch extents
  int64_t columns;     // product of the reduced extents: the length of a row

  constexpr int64_t elements() const { return rows * columns; }
  constexpr bool contiguous_rows() const { return minor_reduced && reduced.size == 1; }
  // The elements of a line (geometry/tile.h): those inside of all reduced dimensions.
  constexpr int64_t line() const { return reduced.innermost().stride; }
  // How many batch dimensions are not inside of all reduced ones.
  constexpr int outer_batch() const {
    int outer = 0;
    while (outer < batch.size && (minor_reduced || batch.dim[outer].stride > line())) ++outer;
    return outer;
  }
};

// What counts depend on besides a call's view and its plan.
struct Footprint {
  int in_bytes, out_bytes;  // of an element, and of its first result
  int inputs;               // operands of one shape
  int state_bytes;          // of the state of a row, or of a part of one
  bool packs;               // whether all operands begin with a whole pack, so that memory is accessed by them
  bool row_operands;        // whether a row has results or operands of its own

  constexpr int width() const { return kPackBytes / in_bytes; }  // elements of a pack
};

// A side operand's strides along the dimensions of a view, in elements: 0 where it is broadcast.
struct SideStrides {
  int64_t batch[kMaxDims];
  int64_t reduced[kMaxDims];
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace jax_softmax
