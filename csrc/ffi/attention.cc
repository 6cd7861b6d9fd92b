// XLA's handler of attention's kernels, whose source and launch Python has made (jax_softmax/fusion/attention).
//
// Attributes: `version`, kCallVersion; `code` and `plan`, as of jit::Source; `blocks`, `threads`, `shared_bytes`. A
// kernel is given the addresses of the arguments and, after them, of the results.
#include <vector>

#include "ffi/cuda.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

constexpr uintptr_t kAlignment = 16;  // rows are copied by whole packs

ffi::Error failed(const std::string& message) { return ffi::Error::Internal("jax_softmax: attention: " + message); }

// Sets the source and the launch that attributes describe; returns an error message, or nothing.
std::string read(ffi::Dictionary attributes, jit::Source* source, Launch* launch) {
  const auto version = attributes.get<int64_t>("version");
  if (!version.has_value() || *version != kCallVersion) {
    return "this program was made by another version of jax_softmax: export it again";
  }
  const auto code = attributes.get<std::string_view>("code"), plan = attributes.get<std::string_view>("plan");
  const auto blocks = attributes.get<int64_t>("blocks"), threads = attributes.get<int64_t>("threads"),
             shared_bytes = attributes.get<int64_t>("shared_bytes");
  if (!code.has_value() || !plan.has_value() || !blocks.has_value() || !threads.has_value() ||
      !shared_bytes.has_value()) {
    return "an attribute is missing";
  }
  *source = {std::string(*code), std::string(*plan)};
  launch->blocks = *blocks;
  launch->threads = static_cast<int>(*threads);
  launch->shared_bytes = *shared_bytes;
  return {};
}

ffi::Error initialize(int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  jit::Source source;
  Launch launch{};
  if (const std::string message = read(attributes, &source, &launch); !message.empty()) return failed(message);
  const auto kernel = jit::get(source, ordinal);
  return kernel ? ffi::Error::Success() : failed(kernel.error.message);
}

ffi::Error execute(jit::CUstream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  jit::Source source;
  Launch launch{};
  if (const std::string message = read(attributes, &source, &launch); !message.empty()) return failed(message);
  std::vector<uintptr_t> words;
  for (size_t k = 0; k < args.size(); ++k) {
    words.push_back(reinterpret_cast<uintptr_t>(args.get<ffi::AnyBuffer>(k)->untyped_data()));
  }
  for (size_t k = 0; k < rets.size(); ++k) {
    words.push_back(reinterpret_cast<uintptr_t>((*rets.get<ffi::AnyBuffer>(k))->untyped_data()));
  }
  for (const uintptr_t word : words) {
    if (word % kAlignment != 0) return failed("an operand does not begin at a multiple of 16 bytes");
  }
  const auto kernel = jit::get(source, ordinal);
  if (!kernel) return failed(kernel.error.message);
  const jit::Error error = jit::launch(*kernel.value, launch, stream, words.data());
  return error ? failed(error.message) : ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInitialize, returning_errors(initialize), bound_to_initialize());

// The same operands always lead to the same launch, so XLA may record it into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(kExecute, returning_errors(execute), bound_to_execute(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* attention_initialize_handler() { return reinterpret_cast<void*>(+kInitialize); }
void* attention_execute_handler() { return reinterpret_cast<void*>(+kExecute); }

}  // namespace jax_softmax
