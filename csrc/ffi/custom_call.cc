#include "ffi/custom_call.h"

#include <algorithm>
#include <iterator>
#include <string_view>

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

// In the order of DType.
constexpr ffi::DataType kTypes[kDTypes] = {
    ffi::DataType::F16,    ffi::DataType::BF16, ffi::DataType::F32, ffi::DataType::F64, ffi::DataType::F8E4M3FN,
    ffi::DataType::F8E5M2, ffi::DataType::S8,   ffi::DataType::U8,  ffi::DataType::S32, ffi::DataType::PRED};

// Appends a buffer's type and address; false if the type is none that we know.
bool add(ffi::AnyBuffer buffer, std::vector<Array>* arrays, std::vector<void*>* addresses) {
  const auto type = std::find(std::begin(kTypes), std::end(kTypes), buffer.element_type());
  if (type == std::end(kTypes)) return false;
  arrays->push_back({static_cast<DType>(type - kTypes), {buffer.dimensions().begin(), buffer.dimensions().end()}});
  addresses->push_back(buffer.untyped_data());
  return true;
}

}  // namespace

ffi::Error read_buffers(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes, CustomCall* call,
                        Buffers* buffers) {
  const auto version = attributes.get<int64_t>("version");
  if (!version.has_value() || *version != kCallVersion) {
    return invalid("this program was made by another version of jax_softmax: export it again");
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value() || !add(*buffer, &call->operands, &buffers->in)) {
      return invalid("unsupported dtype of an operand");
    }
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value() || !add(**buffer, &call->results, &buffers->out)) {
      return invalid("unsupported dtype of a result");
    }
  }
  return ffi::Error::Success();
}

bool read_attribute(ffi::Dictionary attributes, const char* name, std::string* value) {
  const auto text = attributes.get<std::string_view>(name);
  if (text.has_value()) *value = *text;
  return text.has_value();
}

bool read_attribute(ffi::Dictionary attributes, const char* name, std::vector<int64_t>* value) {
  const auto numbers = attributes.get<ffi::Span<const int64_t>>(name);
  if (numbers.has_value()) value->assign(numbers->begin(), numbers->end());
  return numbers.has_value();
}

ffi::Error read_operator(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes, Call* call,
                         Buffers* buffers) {
  if (ffi::Error error = read_custom_call(args, rets, attributes, call, buffers); error.failure()) return error;
  const std::string message = read_call(call);
  return message.empty() ? ffi::Error::Success() : invalid(message);
}

}  // namespace jax_softmax
