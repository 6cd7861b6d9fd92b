// XLA's handler of attention's kernels (jax_softmax/fusion/attention). Its attributes are `version` and those of
// AttentionCall. A kernel is given tensor maps, if it reads by them, and the addresses of the operands and of the
// results.
#include "plan/attention.h"

#include <cstring>
#include <vector>

#include "ffi/cuda.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

ffi::Error failed(const std::string& message) { return ffi::Error::Internal("jax_softmax: attention: " + message); }

// Sets the call's kernel: found again, or planned, compiled and loaded.
ffi::Error make_ready(const AttentionCall& call, int ordinal, const Ready** ready) {
  const jit::Result<Device> device = device_of(ordinal);
  if (!device) return failed(device.error.message);
  const Key key = key_of(call, true, device.value, ordinal);
  *ready = find_ready(key);
  if (*ready) return ffi::Error::Success();

  Step<jit::Source> step{};
  if (const std::string message = plan_attention(call, device.value, &step); !message.empty()) return failed(message);
  const jit::Result<const Ready*> loaded = load_kernels(key, {step}, 0, device.value, ordinal);
  if (!loaded) return failed(loaded.error.message);
  *ready = loaded.value;
  return ffi::Error::Success();
}

// Tensor maps are made of the addresses at each execution, as XLA moves buffers.
jit::Result<std::vector<jit::CUtensorMap>> parameter_of(const Launch& launch, const std::vector<void*>& addresses) {
  std::vector<jit::CUtensorMap> parameter;
  for (const MappedArray& array : launch.maps) {
    const jit::Result<jit::CUtensorMap> map = jit::tensor_map(array, addresses[parameter.size()]);
    if (!map) return map.error;
    parameter.push_back(map.value);
  }
  const size_t bytes = addresses.size() * sizeof(void*);
  parameter.resize(parameter.size() + ceil_div(bytes, sizeof(jit::CUtensorMap)));
  std::memcpy(parameter.data() + launch.maps.size(), addresses.data(), bytes);
  return parameter;
}

ffi::Error initialize(int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  AttentionCall call;
  Buffers buffers;
  if (ffi::Error error = read_custom_call(args, rets, attributes, &call, &buffers); error.failure()) return error;
  const Ready* ready;
  return make_ready(call, ordinal, &ready);
}

ffi::Error execute(jit::CUstream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  AttentionCall call;
  Buffers buffers;
  if (ffi::Error error = read_custom_call(args, rets, attributes, &call, &buffers); error.failure()) return error;
  std::vector<void*> addresses = buffers.in;
  addresses.insert(addresses.end(), buffers.out.begin(), buffers.out.end());
  if (!begin_with_packs(addresses)) {  // rows are copied by whole packs
    return failed("an operand does not begin at a multiple of 16 bytes");
  }
  const Ready* ready;
  if (ffi::Error error = make_ready(call, ordinal, &ready); error.failure()) return error;
  const auto& [kernel, launch, rows] = ready->steps[0];
  const jit::Result<std::vector<jit::CUtensorMap>> parameter = parameter_of(launch, addresses);
  if (!parameter) return failed(parameter.error.message);
  const jit::Error error = jit::launch(*kernel, launch, stream, parameter.value.data());
  return error ? failed(error.message) : ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInitialize, returning_errors(initialize), bound_to_initialize());

// The same operands always lead to the same launch, so XLA may record it into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(kExecute, returning_errors(execute), bound_to_execute(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* attention_initialize_handler() { return reinterpret_cast<void*>(+kInitialize); }
void* attention_execute_handler() { return reinterpret_cast<void*>(+kExecute); }

}  // namespace jax_softmax
