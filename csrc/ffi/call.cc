#include "ffi/call.h"

#include <algorithm>

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
    default:
      return {};
  }
}

std::optional<Op> op_of(std::string_view name) {
  for (int i = 0; i < kOps; ++i) {
    if (name == kOperators[i].name) return static_cast<Op>(i);
  }
  return {};
}

std::vector<int64_t> shape_of(ffi::AnyBuffer buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

}  // namespace

std::vector<int64_t> shape_of_rows(const CallShape& call) {
  std::vector<int64_t> shape = call.shape;
  for (const int64_t axis : call.axes) {
    if (axis >= 0 && axis < static_cast<int64_t>(shape.size())) shape[axis] = 1;  // make_view refuses others
  }
  return shape;
}

std::string describe(const CallShape& call) {
  std::string text = std::string(facts_of(call.op).name) + " of an array of shape (";
  for (size_t i = 0; i < call.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(call.shape[i]);
  return text + ")";
}

ffi::Error read_call(ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view op,
                     ffi::Span<const int64_t> axes, std::string_view fused, CallShape* call, CallBuffers* buffers) {
  const auto invalid = [](const std::string& message) {
    return ffi::Error::InvalidArgument("jax_softmax: " + message);
  };
  const std::optional<Op> known = op_of(op);
  if (!known) return invalid("unknown operator " + std::string(op));
  *call = CallShape{};
  *buffers = CallBuffers{};
  call->op = *known;
  call->fused = fused;
  const Cost& cost = cost_of(call->op);
  const size_t inputs = cost.inputs, results = cost.element_results + cost.row_results;
  if (args.size() < inputs + cost.row_numbers + cost.labelled || args.size() > inputs + kMostSides ||
      rets.size() < results || rets.size() > results + 1) {
    return invalid("wrong number of operands or results");
  }
  call->axes.assign(axes.begin(), axes.end());
  std::optional<DType> in_type;
  for (size_t i = 0; i < inputs; ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return invalid("an operand is missing");
    const std::optional<DType> type = dtype_of(buffer->element_type());
    if (i == 0) call->shape = shape_of(*buffer);
    if (shape_of(*buffer) != call->shape) return invalid(describe(*call) + ": the operands differ in shape");
    // Of 8 bits there are softmaxes alone.
    if (!type || (i > 0 && type != in_type) || (bytes_of(*type) == 1 && (inputs > 1 || cost.row_results > 0))) {
      return invalid(describe(*call) + ": unsupported dtypes");
    }
    in_type = type;
    buffers->in[i] = buffer->untyped_data();
  }
  call->in = call->out = *in_type;
  if (cost.element_results) {
    auto out = rets.get<ffi::AnyBuffer>(0);
    const std::optional<DType> type = out.has_value() ? dtype_of((*out)->element_type()) : std::nullopt;
    const bool quantized = facts_of(call->op).quantizes && type == DType::kI8;
    if (!type || (is_integer(*type) && !quantized)) return invalid(describe(*call) + ": unsupported dtypes");
    if (shape_of(**out) != call->shape) return invalid(describe(*call) + ": the result differs in shape");
    call->out = *type;
    buffers->out = (*out)->untyped_data();
  }
  const DType wide = call->in == DType::kF64 || call->out == DType::kF64 ? DType::kF64 : DType::kF32;
  for (int k = 0; k < cost.row_results; ++k) {
    auto result = rets.get<ffi::AnyBuffer>(cost.element_results + k);
    if (!result.has_value() || shape_of(**result) != shape_of_rows(*call) ||
        dtype_of((*result)->element_type()) != wide) {
      return invalid(describe(*call) + ": a result of rows is not as it must be");
    }
    buffers->of_rows[k] = (*result)->untyped_data();
  }
  std::vector<ffi::DataType> types;  // of those that are no mask
  for (size_t i = inputs; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return invalid("an operand is missing");
    std::vector<int64_t> shape = shape_of(*buffer);
    const bool is_mask = buffer->element_type() == ffi::DataType::PRED;
    if (shape.size() > call->shape.size() || (is_mask && i + 1 < args.size())) {
      return invalid(describe(*call) + ": the mask must be boolean and of no higher rank");
    }
    shape.insert(shape.begin(), call->shape.size() - shape.size(), 1);
    call->masked = is_mask;
    call->sides.push_back(shape);
    if (!is_mask) types.push_back(buffer->element_type());
    buffers->side[i - inputs] = buffer->untyped_data();
  }
  // The last of those that are no mask are what rows have of their own: numbers, and then a label.
  for (int left = cost.row_numbers + cost.labelled; left > 0; --left) {
    const bool is_label = cost.labelled && left == cost.row_numbers + cost.labelled;
    const bool fits = !types.empty() && call->sides[types.size() - 1] == shape_of_rows(*call) &&
                      (is_label ? types.back() == ffi::DataType::S32 : dtype_of(types.back()) == wide);
    if (!fits) return invalid(describe(*call) + ": what rows have of their own is not as it must be");
    types.pop_back();
  }
  for (const ffi::DataType type : types) {
    if (!dtype_of(type)) return invalid(describe(*call) + ": unsupported dtypes");
    call->side_types.push_back(*dtype_of(type));
  }
  if (!call->side_types.empty() && call->fused.empty()) {
    return invalid(describe(*call) + ": there are operands that nothing reads");
  }
  if (rets.size() > results) {
    auto scratch = rets.get<ffi::AnyBuffer>(results);
    if (!scratch.has_value()) return invalid("the memory to work with is missing");
    buffers->scratch = (*scratch)->untyped_data();
    buffers->scratch_bytes = static_cast<int64_t>((*scratch)->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace jax_softmax
