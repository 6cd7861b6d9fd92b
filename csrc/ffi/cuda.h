// The CUDA kernels of a call: for the handlers, and for Python, which has them compiled while JAX lowers a program.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "ffi/custom_call.h"
#include "jit/jit.h"

namespace jax_softmax {

// What XLA hands to the handlers of CUDA kernels.
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

// All that a call's plan depends on, as bytes.
using Key = std::string;
template <class T>
void add(Key* key, T value) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}
template <class Sequence>
void add_all(Key* key, const Sequence& values) {
  add(key, values.size());
  key->append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(*values.data()));
}
// `packs`: whether operands and results of elements begin with whole packs.
template <class Call>
Key key_of(const Call& call, bool packs, const Device& device, int ordinal) {
  Key key;
  for (const int number : {ordinal, device.shared_memory_per_block, device.largest_cluster, int{packs}}) {
    add(&key, number);
  }
  for (const auto* arrays : {&call.operands, &call.results}) {
    add(&key, arrays->size());
    for (const Array& array : *arrays) {
      add(&key, array.dtype);
      add_all(&key, array.shape);
    }
  }
  Call::each(call, [&](std::string_view name, const auto& value) {
    add_all(&key, name);
    add_all(&key, value);
  });
  return key;
}

// A call's kernels, loaded and ready to be launched. They are never unloaded: a captured graph may launch them at any
// time.
struct Ready {
  std::vector<Step<const jit::LoadedKernel*>> steps;
  int64_t scratch_bytes;
};
// What load_kernels has made for the key, or null.
const Ready* find_ready(const Key& key);
// Compiles and loads the kernels of a plan, and keeps them by the key.
jit::Result<const Ready*> load_kernels(const Key& key, const std::vector<Step<jit::Source>>& steps,
                                       int64_t scratch_bytes, const Device& device, int ordinal);

// Whether addresses are multiples of a pack.
bool begin_with_packs(const std::vector<void*>& addresses);

// The device, within the limits of limit_devices.
jit::Result<Device> device_of(int ordinal);
std::vector<std::tuple<int, int, int, int>> devices_here();  // the numbers of each Device

// From now on every device has no more than this for plans, so that tests reach the schedules of other chips.
void limit_devices(int shared_memory_per_block, int largest_cluster);

}  // namespace jax_softmax
