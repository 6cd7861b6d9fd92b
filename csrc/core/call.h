// What a call is, but for where its operands lie.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/op.h"
#include "geometry/operands.h"
#include "geometry/view.h"

namespace jax_softmax {

// An operand or a result, as it is in memory.
struct Array {
  DType dtype;
  std::vector<int64_t> shape;
};

// What a call says of itself besides its arrays. Exported programs hold it.
struct Attributes {
  std::string_view op;  // a name in kOperators
  std::vector<int64_t> axes;
  std::string_view sides;  // the roles of the operands that broadcast: see read_call
  std::string_view load, store;
};

// An operand that broadcasts to the shape of the operator's own.
struct SideOperand {
  Role role;
  DType dtype;                 // of an index, int32
  std::vector<int64_t> shape;  // of the call's rank: its extents, or 1
};

// Expressions are C++ over `C`, the type of the arithmetic. They read the arrays and indices among the sides as s0, s1,
// ..., in their order.
struct Call {
  Op op;
  DType in;
  std::vector<DType> out;  // of each result of elements, if the operator has any
  std::vector<int64_t> shape, axes;
  std::vector<SideOperand> sides;
  // Whether what the operator gives as results of rows are operands instead: numbers before the row's own. On a CPU.
  bool rows_given;
  // A line for each of the operator's own operands: what an element counts as, given x0, x1, ..., as they are in
  // memory. An empty line, or none, leaves it as it is.
  // Where operands and results have 16 bits, a softmax takes values beyond 2^24 for 16-bit numbers too: see
  // Relative<Approximate> in device/math.cuh.
  std::string load;
  // A line for each result of elements, given the operator's result y, which an empty line stands for. Without any line
  // there is one result, y.
  std::string store;

  bool masked() const;
  // The shape of what rows have, of the rank of the operands: with extent 1 along the axes.
  std::vector<int64_t> shape_of_rows() const;
};

// The call of a program, and what is wrong with it, or nothing: the same for those that run and those that are planned.
//
// `sides` names roles, "array", "index:D" (along dimension D of the call), "number", "label" or "mask", with spaces
// between them. Operands: the operator's own, of one shape and dtype, then the sides but for indices. Numbers are in
// the dtype of the arithmetic, labels int32, masks boolean; numbers and labels have extent 1 along the axes. Results:
// of elements, then of rows, in the dtype of the arithmetic; then possibly memory to work with. Without the results of
// rows these are operands, on a CPU: numbers before the others.
std::string read_call(const Attributes& attributes, const std::vector<Array>& operands,
                      const std::vector<Array>& results, Call* call);

// "op of an array of shape (...)", for messages.
std::string describe(const Call& call);

// `shape` and the side operands' shapes have the same rank; a side operand's entries are the shape's or 1. `axes` are
// distinct numbers in [0, rank). Sets the view and each side operand's strides along it. Returns an error message,
// empty when all is well.
std::string make_view(const std::vector<int64_t>& shape, const std::vector<std::vector<int64_t>>& sides,
                      const std::vector<int64_t>& axes, View* view, std::vector<Strides>* strides);

std::vector<std::string> lines_of(const std::string& text);

// The dtype that a call computes in, and that its rows' results have.
DType arithmetic_of(const Call& call);

}  // namespace jax_softmax
