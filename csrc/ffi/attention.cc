// XLA's handler of attention's kernels (jax_softmax/fusion/attention). Its attributes are `version` and those of
// AttentionCall. A kernel is given tensor maps, if it reads by them, and the addresses of the operands and, after them,
// of the results.
#include "plan/attention.h"

#include <numeric>
#include <string>

#include "ffi/cuda.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

ffi::Error plan(const XlaCall& xla_call, const Addresses& addresses, Planned* planned) {
  AttentionCall call;
  Buffers buffers;
  ffi::Error error = read_custom_call(xla_call.args, xla_call.rets, xla_call.attributes, &call, &buffers);
  if (error.failure()) return error;
  planned->call = "attention";
  const jit::Result<Device> device = device_of(xla_call.ordinal);
  if (!device) return failed(planned->call, device.error.message);
  if (!begin_with_packs(addresses)) {  // rows are copied by whole packs
    return failed(planned->call, "an operand does not begin at a multiple of 16 bytes");
  }
  const std::string message = plan_attention(call, device.value, &planned->steps.emplace_back());
  if (!message.empty()) return failed(planned->call, message);
  planned->words.resize(addresses.size());
  std::iota(planned->words.begin(), planned->words.end(), 0);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInitialize, returning_errors(initialize<AttentionCall, plan>), bound_to_initialize());

// The same operands always lead to the same launch, so XLA may record it into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(kExecute, returning_errors(execute<AttentionCall, plan>), bound_to_execute(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* attention_initialize_handler() { return reinterpret_cast<void*>(+kInitialize); }
void* attention_execute_handler() { return reinterpret_cast<void*>(+kExecute); }

}  // namespace jax_softmax
