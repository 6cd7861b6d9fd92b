#include "ffi/call.h"

#include <algorithm>
#include <optional>
#include <string_view>

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

std::optional<DType> dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F64:
      return DType::kF64;
    case ffi::DataType::F8E4M3FN:
      return DType::kF8E4M3;
    case ffi::DataType::F8E5M2:
      return DType::kF8E5M2;
    case ffi::DataType::S8:
      return DType::kI8;
    case ffi::DataType::U8:
      return DType::kU8;
    case ffi::DataType::S32:
      return DType::kI32;
    case ffi::DataType::PRED:
      return DType::kBool;
    default:
      return {};
  }
}

std::vector<int64_t> shape_of(ffi::AnyBuffer buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

// The sides that the attribute names, without their dtypes and shapes; an error message, or nothing.
std::string read_sides(std::string_view text, const std::vector<int64_t>& shape, std::vector<SideOperand>* sides) {
  constexpr std::string_view kIndexPrefix = "index:";
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    SideOperand side{};
    if (word == "array") {
      side.role = Role::kArray;
    } else if (word == "number") {
      side.role = Role::kNumber;
    } else if (word == "label") {
      side.role = Role::kLabel;
    } else if (word == "mask") {
      side.role = Role::kMask;
    } else if (word.substr(0, kIndexPrefix.size()) == kIndexPrefix) {
      const std::string digits(word.substr(kIndexPrefix.size()));
      const bool number = !digits.empty() && digits.size() < 4 && digits.find_first_not_of("0123456789") == digits.npos;
      if (!number || std::stoul(digits) >= shape.size()) return "no such dimension: " + std::string(word);
      side = {Role::kIndex, DType::kI32, std::vector<int64_t>(shape.size(), 1)};
      side.shape[std::stoul(digits)] = shape[std::stoul(digits)];
    } else {
      return "no such operand: " + std::string(word);
    }
    sides->push_back(side);
  }
  return {};
}

int count(const Call& call, Role role) {
  return static_cast<int>(
      std::count_if(call.sides.begin(), call.sides.end(), [&](const SideOperand& side) { return side.role == role; }));
}

// What is wrong with a side operand, or nothing.
const char* mistake_of(const SideOperand& side, const Call& call, DType arithmetic) {
  switch (side.role) {
    case Role::kMask:
      return side.dtype == DType::kBool ? nullptr : "the mask must be boolean";
    case Role::kNumber:
      if (side.dtype != arithmetic) return "numbers of rows must be in the dtype of the arithmetic";
      break;
    case Role::kLabel:
      if (side.dtype != DType::kI32) return "labels must be int32";
      break;
    default:
      return nullptr;
  }
  return side.shape == call.shape_of_rows() ? nullptr : "what rows have must be of extent 1 along the axes";
}

// ---- each of these reads some of the buffers and says what is wrong with them, or nothing

std::string read_inputs(ffi::RemainingArgs args, const Cost& cost, Call* call, CallBuffers* buffers) {
  for (int i = 0; i < cost.inputs; ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return "an operand is missing";
    const std::optional<DType> type = dtype_of(buffer->element_type());
    if (i == 0) call->shape = shape_of(*buffer);
    if (shape_of(*buffer) != call->shape) return "the operands differ in shape";
    if (!type || (i > 0 && type != call->in)) return "unsupported dtypes";
    call->in = *type;
    buffers->in.push_back(buffer->untyped_data());
  }
  return {};
}

std::string read_results(ffi::RemainingRets rets, size_t element_results, size_t row_results, Call* call,
                         CallBuffers* buffers) {
  for (size_t k = 0; k < element_results; ++k) {
    auto out = rets.get<ffi::AnyBuffer>(k);
    const std::optional<DType> type = out.has_value() ? dtype_of((*out)->element_type()) : std::nullopt;
    if (!type) return "unsupported dtypes";
    if (shape_of(**out) != call->shape) return "a result differs in shape";
    call->out.push_back(*type);
    buffers->out.push_back((*out)->untyped_data());
  }
  if (std::string message = unsupported_dtypes(*call); !message.empty()) return message;
  for (size_t k = 0; k < row_results; ++k) {
    auto result = rets.get<ffi::AnyBuffer>(element_results + k);
    if (!result.has_value() || shape_of(**result) != call->shape_of_rows() ||
        dtype_of((*result)->element_type()) != arithmetic_of(*call)) {
      return "a result of rows is not as it must be";
    }
    buffers->of_rows.push_back((*result)->untyped_data());
  }
  return {};
}

std::string read_side_buffers(ffi::RemainingArgs args, const Cost& cost, Call* call, CallBuffers* buffers) {
  size_t next = cost.inputs;
  for (SideOperand& side : call->sides) {
    buffers->side.push_back(nullptr);
    if (side.role == Role::kIndex) continue;
    const auto buffer = args.get<ffi::AnyBuffer>(next++);
    if (!buffer.has_value()) return "an operand is missing";
    const std::optional<DType> type = dtype_of(buffer->element_type());
    side.shape = shape_of(*buffer);
    if (!type || side.shape.size() > call->shape.size()) return "an operand that broadcasts is not as it must be";
    side.dtype = *type;
    side.shape.insert(side.shape.begin(), call->shape.size() - side.shape.size(), 1);
    if (const char* mistake = mistake_of(side, *call, arithmetic_of(*call))) return mistake;
    buffers->side.back() = buffer->untyped_data();
  }
  const int numbers = cost.row_numbers + (call->rows_given ? cost.row_results : 0);
  const bool fits = next == args.size() && count(*call, Role::kNumber) == numbers &&
                    count(*call, Role::kLabel) == cost.labelled && count(*call, Role::kMask) <= 1;
  return fits ? "" : "wrong number of operands";
}

}  // namespace

std::string describe(const Call& call) {
  std::string text = std::string(facts_of(call.op).name) + " of an array of shape (";
  for (size_t i = 0; i < call.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(call.shape[i]);
  return text + ")";
}

ffi::Error read_call(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes, Call* call,
                     CallBuffers* buffers) {
  const auto invalid = [](const std::string& message) {
    return ffi::Error::InvalidArgument("jax_softmax: " + message);
  };
  const auto version = attributes.get<int64_t>("version");
  if (!version.has_value() || *version != kCallVersion) {
    return invalid("this program was made by another version of jax_softmax: export it again");
  }
  const auto op = attributes.get<std::string_view>("op"), sides = attributes.get<std::string_view>("sides"),
             load = attributes.get<std::string_view>("load"), store = attributes.get<std::string_view>("store");
  const auto axes = attributes.get<ffi::Span<const int64_t>>("axes");
  if (!op.has_value() || !sides.has_value() || !load.has_value() || !store.has_value() || !axes.has_value()) {
    return invalid("an attribute is missing");
  }
  const std::optional<Op> known = op_of(*op);
  if (!known) return invalid("unknown operator " + std::string(*op));
  *call = Call{};
  *buffers = CallBuffers{};
  call->op = *known;
  call->load = *load;
  call->store = *store;
  call->axes.assign(axes->begin(), axes->end());
  const Cost& cost = cost_of(call->op);
  const size_t element_results = cost.element_results ? std::max<size_t>(1, lines_of(call->store).size()) : 0;
  call->rows_given = cost.row_results > 0 && element_results > 0 && rets.size() == element_results;
  const size_t row_results = call->rows_given ? 0 : cost.row_results, results = element_results + row_results;
  if (args.size() < static_cast<size_t>(cost.inputs) || rets.size() < results || rets.size() > results + 1) {
    return invalid("wrong number of operands or results");
  }

  std::string message = read_inputs(args, cost, call, buffers);
  if (message.empty()) message = read_results(rets, element_results, row_results, call, buffers);
  if (message.empty()) message = read_sides(*sides, call->shape, &call->sides);
  if (message.empty()) message = read_side_buffers(args, cost, call, buffers);
  if (!message.empty()) return invalid(describe(*call) + ": " + message);

  if (rets.size() > results) {
    auto scratch = rets.get<ffi::AnyBuffer>(results);
    if (!scratch.has_value()) return invalid("the memory to work with is missing");
    buffers->scratch = (*scratch)->untyped_data();
    buffers->scratch_bytes = static_cast<int64_t>((*scratch)->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace jax_softmax
