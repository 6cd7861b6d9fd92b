#include "core/call.h"

#include <algorithm>

namespace jax_softmax {

bool Call::masked() const {
  return std::any_of(sides.begin(), sides.end(), [](const SideOperand& side) { return side.role == Role::kMask; });
}

std::vector<int64_t> Call::shape_of_rows() const {
  std::vector<int64_t> of_rows = shape;
  for (const int64_t axis : axes) {
    if (axis >= 0 && axis < static_cast<int64_t>(shape.size())) of_rows[axis] = 1;  // make_view refuses others
  }
  return of_rows;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; !text.empty();) {
    const size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  return lines;
}

DType arithmetic_of(const Call& call) {
  const bool wide = call.in == DType::kF64 || std::count(call.out.begin(), call.out.end(), DType::kF64) > 0;
  return wide ? DType::kF64 : DType::kF32;
}

std::string unsupported_dtypes(const Call& call) {
  const Operator& op = facts_of(call.op);
  if (!is_element(call.in)) return std::string("unsupported dtype ") + name_of(call.in);
  for (const DType out : call.out) {
    if (!is_element(out) && !(op.quantizes && is_quantized(out))) {
      return std::string("unsupported dtype of a result, ") + name_of(out);
    }
  }
  return {};
}

}  // namespace jax_softmax
