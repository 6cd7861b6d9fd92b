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
    if (name == kOpNames[i]) return static_cast<Op>(i);
  }
  return {};
}

std::vector<int64_t> shape_of(ffi::AnyBuffer buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

}  // namespace

std::string describe(const CallShape& call) {
  std::string text = std::string(kOpNames[static_cast<int>(call.op)]) + " of an array of shape (";
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
  const size_t inputs = inputs_of(call->op);
  if (args.size() < inputs || args.size() > inputs + kMostSides || rets.size() < 1 || rets.size() > 2) {
    return invalid("wrong number of operands or results");
  }
  auto out = rets.get<ffi::AnyBuffer>(0);
  if (!out.has_value()) return invalid("the result is missing");
  call->shape = shape_of(**out);
  call->axes.assign(axes.begin(), axes.end());
  const std::optional<DType> out_type = dtype_of((*out)->element_type());
  buffers->out = (*out)->untyped_data();
  std::optional<DType> in_type;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return invalid("an operand is missing");
    const std::optional<DType> type = dtype_of(buffer->element_type());
    std::vector<int64_t> shape = shape_of(*buffer);
    if (i < inputs) {
      if (shape != call->shape) return invalid(describe(*call) + ": the operands and the result differ in shape");
      // The linear maps have operands of 16 bits at the least.
      if (!type || !out_type || (i > 0 && type != in_type) || is_integer(*out_type) ||
          (bytes_of(*type) == 1 && inputs > 1)) {
        return invalid(describe(*call) + ": unsupported dtypes");
      }
      in_type = type;
      buffers->in[i] = buffer->untyped_data();
      continue;
    }
    const bool is_mask = buffer->element_type() == ffi::DataType::PRED;
    if (shape.size() > call->shape.size() || (is_mask ? i + 1 < args.size() : !type || call->fused.empty())) {
      return invalid(describe(*call) + ": the mask must be boolean and of no higher rank");
    }
    call->masked = is_mask;
    if (!is_mask) call->side_types.push_back(*type);
    shape.insert(shape.begin(), call->shape.size() - shape.size(), 1);
    call->sides.push_back(shape);
    buffers->side[i - inputs] = buffer->untyped_data();
  }
  call->in = *in_type;
  call->out = *out_type;
  if (rets.size() > 1) {
    auto scratch = rets.get<ffi::AnyBuffer>(1);
    if (!scratch.has_value()) return invalid("the memory to work with is missing");
    buffers->scratch = (*scratch)->untyped_data();
    buffers->scratch_bytes = static_cast<int64_t>((*scratch)->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace jax_softmax
