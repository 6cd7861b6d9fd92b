// The CUDA kernels of a call: for the handlers, and for Python, which has them compiled while JAX lowers a program.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/custom_call.h"
#include "jit/jit.h"
#include "plan/plan.h"

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

// A step of a plan with its source.
struct PlannedStep {
  jit::Source source;
  Launch launch;
  int64_t rows;
};

struct Planned {
  std::vector<PlannedStep> steps;
  int64_t scratch_bytes;
};

// Sets the problem of a call whose operands are aligned to packs; returns an error message, or nothing.
std::string problem_of(const Call& call, Problem* problem);

// Nothing where no schedule covers the view.
std::optional<Planned> plan_call(const Call& call, const Problem& problem, const Device& device);

// The device, within the limits of limit_devices.
jit::Result<Device> device_of(int ordinal);
std::vector<std::tuple<int, int, int, int>> devices_here();  // the numbers of each Device

// From now on every device has no more than this for plans, so that tests reach the schedules of other chips.
void limit_devices(int shared_memory_per_block, int largest_cluster);

}  // namespace jax_softmax
