// The CUDA kernels of a call: for the handlers, and for Python, which has them compiled while JAX lowers a program.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "ffi/custom_call.h"
#include "jit/jit.h"

namespace jax_softmax {

// A call as XLA hands it to a handler.
struct XlaCall {
  int ordinal;
  xla::ffi::RemainingArgs args;
  xla::ffi::RemainingRets rets;
  xla::ffi::Dictionary attributes;
};

// The addresses of a call's operands and then of its results; all null where they are not known yet.
using Addresses = std::vector<void*>;

// What a launch needs of a call.
template <class Kernel>
struct Prepared {
  std::string call;  // in words, for messages
  std::vector<Step<Kernel>> steps;
  // The kernels' parameter, between the tensor maps of each step, if it has any, and its rows. A word is the address of
  // this number; kNull is null.
  std::vector<int> words;
};
inline constexpr int kNull = -1;
using Planned = Prepared<jit::Source>;
// Of loaded kernels. They are never unloaded: a captured graph may launch them at any time.
using Ready = Prepared<const jit::LoadedKernel*>;

// Plans a call. Its addresses say what begins with packs.
using Planner = xla::ffi::Error (*)(const XlaCall& call, const Addresses& addresses, Planned* planned);

// All that a call's plan depends on, as bytes.
using Key = std::string;

// What a thread keeps from one call for the next, so that a call that is ready allocates no memory. No handler runs
// inside another one.
struct Kept {
  Key key;
  Addresses addresses;
  std::vector<uint64_t> parameter;
};
inline thread_local Kept kept;

// Sets the addresses, if they are known, and begins the key with all but the attributes.
void begin_key(const XlaCall& call, bool have_addresses, Key* key, Addresses* addresses);
void add_attribute(const XlaCall& call, const char* name, const std::string& type, Key* key);
void add_attribute(const XlaCall& call, const char* name, const std::vector<int64_t>& type, Key* key);

// Sets what was made ready for the key, or plans, compiles and loads it.
xla::ffi::Error find_or_make(const XlaCall& call, Planner plan, const Key& key, const Addresses& addresses,
                             const Ready** ready);

xla::ffi::Error launch(const Ready& ready, const Addresses& addresses, jit::CUstream stream);

// The same of a call whose attributes `Call::each` names.
template <class Call>
xla::ffi::Error make_ready(const XlaCall& call, Planner plan, bool have_addresses, const Ready** ready) {
  static const Call attributes{};
  begin_key(call, have_addresses, &kept.key, &kept.addresses);
  Call::each(attributes, [&](const char* name, const auto& type) { add_attribute(call, name, type, &kept.key); });
  return find_or_make(call, plan, kept.key, kept.addresses, ready);
}

// Makes and loads what `execute` launches, before anything is captured into a CUDA graph. XLA calls it before each
// execution. Buffers may have no addresses yet; XLA aligns them to packs.
template <class Call, Planner plan>
xla::ffi::Error initialize(int32_t ordinal, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                           xla::ffi::Dictionary attributes) {
  const Ready* ready;
  return make_ready<Call>({ordinal, args, rets, attributes}, plan, false, &ready);
}

template <class Call, Planner plan>
xla::ffi::Error execute(jit::CUstream stream, int32_t ordinal, xla::ffi::RemainingArgs args,
                        xla::ffi::RemainingRets rets, xla::ffi::Dictionary attributes) {
  const Ready* ready;
  xla::ffi::Error error = make_ready<Call>({ordinal, args, rets, attributes}, plan, true, &ready);
  return error.failure() ? error : launch(*ready, kept.addresses, stream);
}

inline auto bound_to_initialize() {
  return xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

inline auto bound_to_execute() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<jit::CUstream>>()
      .Ctx<xla::ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

xla::ffi::Error failed(const std::string& call, const std::string& message);

// Whether addresses are multiples of a pack.
bool begin_with_packs(const Addresses& addresses);

// The device, within the limits of limit_devices.
jit::Result<Device> device_of(int ordinal);
std::vector<std::tuple<int, int, int, int>> devices_here();  // the numbers of each Device

// From now on every device has no more than this for plans, so that tests reach the schedules of other chips.
void limit_devices(int shared_memory_per_block, int largest_cluster);

}  // namespace jax_softmax
