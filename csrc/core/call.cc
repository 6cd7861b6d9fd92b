#include "core/call.h"

#include <algorithm>
#include <iterator>
#include <optional>

namespace jax_softmax {

namespace {

constexpr std::string_view kRoleNames[] = {"array", "index", "number", "label", "mask"};  // in the order of Role

// What is wrong with the dtypes of the operator's own operands and of its results, or nothing.
std::string unsupported_dtypes(const Call& call) {
  const OperatorFacts& op = facts_of(call.op);
  if (!is_element(call.in)) return std::string("unsupported dtype ") + name_of(call.in);
  for (const DType out : call.out) {
    if (!is_element(out) && !(op.quantizes && is_quantized(out))) {
      return std::string("unsupported dtype of a result, ") + name_of(out);
    }
  }
  return {};
}

// Each of these sets a part of the call, and returns what is wrong, or nothing.

// The sides, without their dtypes and shapes.
std::string read_sides(Call* call) {
  const std::vector<int64_t>& shape = call->shape;
  for (const auto& [name, of] : split_sides(call->roles)) {
    const auto role = std::find(std::begin(kRoleNames), std::end(kRoleNames), name);
    const bool is_index = name == kRoleNames[static_cast<int>(Role::kIndex)];
    if (role == std::end(kRoleNames) || is_index == of.empty()) return "no such operand: " + std::string(name);
    SideOperand side{static_cast<Role>(role - std::begin(kRoleNames)), {}, {}};
    if (is_index) {
      const std::string digits(of);
      const bool number = digits.size() < 4 && digits.find_first_not_of("0123456789") == digits.npos;
      if (!number || std::stoul(digits) >= shape.size()) return "no such dimension: index:" + digits;
      side = {Role::kIndex, DType::kI32, std::vector<int64_t>(shape.size(), 1)};
      side.shape[std::stoul(digits)] = shape[std::stoul(digits)];
    }
    call->sides.push_back(side);
  }
  return {};
}

// What is wrong with a side operand, or nothing.
const char* mistake_of(const SideOperand& side, const Call& call) {
  if (side.role == Role::kArray) return nullptr;
  const DType dtype = side.role == Role::kMask    ? DType::kBool
                      : side.role == Role::kLabel ? DType::kI32
                                                  : arithmetic_of(call);
  if (side.dtype != dtype) return "numbers of rows must be in the dtype of the arithmetic, labels int32, masks boolean";
  if (side.role == Role::kMask || side.shape == call.shape_of_rows()) return nullptr;
  return "what rows have must be of extent 1 along the axes";
}

std::string read_own(const Cost& cost, Call* call) {
  call->shape = call->operands[0].shape;
  call->in = call->operands[0].dtype;
  for (int i = 1; i < cost.inputs; ++i) {
    if (call->operands[i].shape != call->shape) return "the operands differ in shape";
    if (call->operands[i].dtype != call->in) return "the operands differ in dtype";
  }
  return {};
}

std::string read_results(size_t element_results, size_t row_results, Call* call) {
  const std::vector<Array>& results = call->results;
  for (size_t k = 0; k < element_results; ++k) {
    if (results[k].shape != call->shape) return "a result differs in shape";
    call->out.push_back(results[k].dtype);
  }
  if (std::string message = unsupported_dtypes(*call); !message.empty()) return message;
  for (size_t k = element_results; k < element_results + row_results; ++k) {
    if (results[k].shape != call->shape_of_rows() || results[k].dtype != arithmetic_of(*call)) {
      return "a result of rows is not as it must be";
    }
  }
  return {};
}

std::string read_side_operands(const Cost& cost, Call* call) {
  const std::vector<Array>& operands = call->operands;
  size_t next = cost.inputs;
  const size_t rank = call->shape.size();
  for (SideOperand& side : call->sides) {
    if (side.role == Role::kIndex) continue;
    if (next == operands.size()) return "an operand is missing";
    const Array& operand = operands[next++];
    if (operand.shape.size() > rank) return "an operand that broadcasts is not as it must be";
    side.dtype = operand.dtype;
    side.shape = operand.shape;
    side.shape.insert(side.shape.begin(), rank - side.shape.size(), 1);
    if (const char* mistake = mistake_of(side, *call)) return mistake;
  }
  const bool fits = next == operands.size() && call->count(Role::kNumber) == cost.row_numbers &&
                    call->count(Role::kLabel) == cost.labelled && call->count(Role::kMask) <= 1;
  return fits ? "" : "wrong number of operands";
}

}  // namespace

int Call::count(Role role) const {
  return static_cast<int>(
      std::count_if(sides.begin(), sides.end(), [&](const SideOperand& side) { return side.role == role; }));
}

std::vector<int64_t> Call::shape_of_rows() const {
  std::vector<int64_t> of_rows = shape;
  for (const int64_t axis : axes) {
    if (axis >= 0 && axis < static_cast<int64_t>(shape.size())) of_rows[axis] = 1;  // make_view refuses others
  }
  return of_rows;
}

std::vector<SideWord> split_sides(std::string_view text) {
  std::vector<SideWord> words;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' ')), name = word.substr(0, word.find(':'));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    words.push_back({name, word.substr(std::min(word.size(), name.size() + 1))});
  }
  return words;
}

std::vector<std::string> split_lines(const std::string& text) {
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

std::string describe(const Call& call) {
  std::string text = std::string(facts_of(call.op).name) + " of an array of shape (";
  for (size_t i = 0; i < call.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(call.shape[i]);
  return text + ")";
}

std::string read_call(Call* call) {
  const std::optional<Op> op = op_of(call->name);
  if (!op) return "unknown operator " + call->name;
  call->op = *op;
  const Cost& cost = cost_of(call->op);
  const size_t element_results = cost.element_results ? std::max<size_t>(1, split_lines(call->store).size()) : 0;
  const size_t own_results = element_results + cost.row_results, results = call->results.size();
  if (call->operands.size() < static_cast<size_t>(cost.inputs) || results < own_results || results > own_results + 1) {
    return "wrong number of operands or results";
  }
  std::string message = read_own(cost, call);
  if (message.empty()) message = read_results(element_results, cost.row_results, call);
  if (message.empty()) message = read_sides(call);
  if (message.empty()) message = read_side_operands(cost, call);
  return message.empty() ? message : describe(*call) + ": " + message;
}

}  // namespace jax_softmax
