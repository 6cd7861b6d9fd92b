// A call of an operator: its operands' shapes and dtypes and its attributes, without addresses.
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

  bool operator==(const Array& other) const { return dtype == other.dtype && shape == other.shape; }
};

// A custom call. Those that follow add its attributes, which `each` names; exported programs hold them.
struct CustomCall {
  std::vector<Array> operands, results;
};

// An operand that broadcasts to the shape of the operator's own.
struct SideOperand {
  Role role;
  DType dtype;                 // of an index, int32
  std::vector<int64_t> shape;  // of the call's rank: its extents, or 1
};

// A call of an operator. `load` and `store` are expressions: C++ over `C`, the type of the arithmetic. s0, s1, ...
// are the arrays and indices among the sides, in their order.
struct Call : CustomCall {
  std::string name;  // in kOperators
  std::vector<int64_t> axes;
  std::string roles;  // of the operands that broadcast: see read_call
  // A line for each of the operator's own operands: the element that the operator takes, given the elements x0, x1, ...
  // in memory. An empty line, or none, leaves the element as it is. Where operands and results have 16 bits, a softmax
  // takes values beyond 2^24 for 16-bit numbers too: see Relative<Approximate> in device/math.cuh.
  std::string load;
  // A line for each result of elements, given the operator's result y. An empty line is y. Without any line there is
  // one result, y.
  std::string store;

  template <class Self, class F>
  static void each(Self& call, F f) {
    f("op", call.name), f("axes", call.axes), f("sides", call.roles), f("load", call.load), f("store", call.store);
  }

  // What read_call sets.
  Op op;
  DType in;
  std::vector<DType> out;  // of each result of elements, if the operator has any
  std::vector<int64_t> shape;
  std::vector<SideOperand> sides;

  int count(Role role) const;  // of the sides
  // The shape of numbers, labels and results of rows: the call's, with extent 1 along the axes.
  std::vector<int64_t> shape_of_rows() const;
};

// A word of an attribute `sides`: "name" or "name:of".
struct SideWord {
  std::string_view name, of;
};
std::vector<SideWord> split_sides(std::string_view text);

// Sets what attributes, operands and results mean; returns what is wrong with them, or nothing.
//
// The attribute `sides` names roles, with spaces between them: "array", "index:D" (along dimension D of the call),
// "number", "label" or "mask". Operands: the operator's own, of one shape and dtype, then the sides other than indices.
// Numbers are in the dtype of the arithmetic, labels int32, masks boolean; numbers and labels have extent 1 along the
// axes. Results: of elements, then of rows, in the dtype of the arithmetic, then possibly scratch memory.
std::string read_call(Call* call);

// "op of an array of shape (...)", for messages.
std::string describe(const Call& call);

// Sets the view of a call that read_call has read, and each side operand's strides along it. Returns what is wrong
// with its shapes and axes, or nothing.
std::string make_view(const Call& call, View* view, std::vector<SideStrides>* strides);

std::vector<std::string> split_lines(const std::string& text);

// The dtype that a call computes in, and that its rows' results have.
DType arithmetic_of(const Call& call);

}  // namespace jax_softmax
