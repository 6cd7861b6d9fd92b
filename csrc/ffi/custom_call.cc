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
bool add(ffi::AnyBuffer buffer, std::vector<Array>* arrays, std::vector<void*>* data) {
  const auto type = std::find(std::begin(kTypes), std::end(kTypes), buffer.element_type());
  if (type == std::end(kTypes)) return false;
  arrays->push_back({static_cast<DType>(type - kTypes), {buffer.dimensions().begin(), buffer.dimensions().end()}});
  data->push_back(buffer.untyped_data());
  return true;
}

}  // namespace

ffi::Error read_custom_call(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes, Call* call,
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
  std::vector<Array> operands, results;
  std::vector<void*> in, out;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value() || !add(*buffer, &operands, &in)) return invalid("unsupported dtype of an operand");
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value() || !add(**buffer, &results, &out)) return invalid("unsupported dtype of a result");
  }
  const Attributes values{*op, {axes->begin(), axes->end()}, *sides, *load, *store};
  if (const std::string message = read_call(values, operands, results, call); !message.empty()) return invalid(message);

  *buffers = CallBuffers{};
  const Cost& cost = cost_of(call->op);
  auto next = in.begin() + cost.inputs;
  buffers->in.assign(in.begin(), next);
  for (const SideOperand& side : call->sides) buffers->side.push_back(side.role == Role::kIndex ? nullptr : *next++);
  const auto of_rows = out.begin() + call->out.size(), scratch = of_rows + cost.row_results - call->n_known;
  buffers->out.assign(out.begin(), of_rows);
  buffers->row_results.assign(of_rows, scratch);
  if (scratch != out.end()) {
    buffers->scratch = *scratch;
    buffers->scratch_bytes = static_cast<int64_t>((*rets.get<ffi::AnyBuffer>(rets.size() - 1))->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace jax_softmax
