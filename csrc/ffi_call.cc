#include "ffi_call.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

bool dtype_of(ffi::DataType type, DType* dtype) {
  switch (type) {
    case ffi::DataType::F16:
      *dtype = DType::kF16;
      return true;
    case ffi::DataType::BF16:
      *dtype = DType::kBF16;
      return true;
    case ffi::DataType::F32:
      *dtype = DType::kF32;
      return true;
    case ffi::DataType::F64:
      *dtype = DType::kF64;
      return true;
    default:
      return false;
  }
}

bool op_of(std::string_view name, Op* op) {
  for (int i = 0; i < kOps; ++i) {
    if (name == kOpNames[i]) {
      *op = static_cast<Op>(i);
      return true;
    }
  }
  return false;
}

bool same_shape(ffi::AnyBuffer a, ffi::AnyBuffer b) {
  if (a.dimensions().size() != b.dimensions().size()) return false;
  for (size_t i = 0; i < a.dimensions().size(); ++i) {
    if (a.dimensions()[i] != b.dimensions()[i]) return false;
  }
  return true;
}

}  // namespace

std::string describe(std::string_view op, ffi::AnyBuffer buffer) {
  std::string text = std::string(op) + " of an array of shape (";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) {
    text += (i ? ", " : "") + std::to_string(buffer.dimensions()[i]);
  }
  return text + ")";
}

ffi::Error make_call(ffi::AnyBuffer first, ffi::RemainingArgs rest, ffi::AnyBuffer out, ffi::RemainingRets more,
                     std::string_view op, ffi::Span<const int64_t> axes, Call* call) {
  const auto invalid = [&](const std::string& message) {
    return ffi::Error::InvalidArgument("jax_softmax: " + describe(op, first) + ": " + message);
  };
  if (!op_of(op, &call->op)) return invalid("unknown operator");
  if (!dtype_of(first.element_type(), &call->dtype)) return invalid("unsupported dtype");
  const size_t inputs = inputs_of(call->op);
  if (rest.size() + 1 != inputs && rest.size() + 1 != inputs + 1) {
    return invalid("wrong number of operands");
  }
  if (!same_shape(first, out) || out.element_type() != first.element_type()) {
    return invalid("the result differs in shape or dtype");
  }
  call->in[0] = first.untyped_data();
  call->in[1] = nullptr;
  call->out = out.untyped_data();
  call->mask = nullptr;
  if (inputs == 2) {
    const auto second = rest.get<ffi::AnyBuffer>(0);
    if (!second.has_value() || !same_shape(first, *second) || second->element_type() != first.element_type()) {
      return invalid("the operands differ in shape or dtype");
    }
    call->in[1] = second->untyped_data();
  }
  int64_t mask_shape[kMaxDims];  // at the operands' rank, which make_view limits
  if (rest.size() == inputs) {
    const auto mask = rest.get<ffi::AnyBuffer>(inputs - 1);
    if (!mask.has_value() || mask->element_type() != ffi::DataType::PRED ||
        mask->dimensions().size() > first.dimensions().size()) {
      return invalid("the mask must be boolean and of no higher rank");
    }
    call->mask = static_cast<const bool*>(mask->untyped_data());
    const size_t rank = first.dimensions().size(), missing = rank - mask->dimensions().size();
    for (size_t i = 0; i < rank && i < kMaxDims; ++i) {
      mask_shape[i] = i < missing ? 1 : mask->dimensions()[i - missing];
    }
  }
  const std::string error =
      make_view(first.dimensions().begin(), call->mask ? mask_shape : nullptr,
                static_cast<int>(first.dimensions().size()), axes.begin(), static_cast<int>(axes.size()), &call->view);
  if (!error.empty()) return invalid(error);
  call->scratch = nullptr;
  if (more.size() > 0) {
    auto scratch = more.get<ffi::AnyBuffer>(0);
    const int64_t needed = scratch_bytes(call->view, call->op, call->dtype);
    if (!scratch.has_value() || static_cast<int64_t>((*scratch)->size_bytes()) < needed) {
      return invalid("the scratch memory must be of " + std::to_string(needed) + " bytes");
    }
    if (needed > 0) call->scratch = (*scratch)->untyped_data();
  }
  return ffi::Error::Success();
}

}  // namespace jax_softmax
