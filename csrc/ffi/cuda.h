// The CUDA kernels of a call, made where they are not there yet. For the handlers, and for Python, which has them made
// while JAX lowers a program.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/call.h"
#include "jit/jit.h"
#include "plan/plan.h"

namespace jax_softmax {

// How a kernel's handlers are bound to XLA's call: what they are given.
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

// A step of a plan, ready to be made and launched.
struct PlannedStep {
  jit::Source source;
  Launch launch;
  int64_t rows;
};

struct Planned {
  std::vector<PlannedStep> steps;
  int64_t scratch_bytes;
};

// The view of the call as a problem to plan for, with all the memory that a plan may want and aligned operands, or an
// error message.
std::string problem_of(const Call& call, Problem* problem);

// Nothing where no schedule covers the view.
std::optional<Planned> plan_call(const Call& call, const Problem& problem, const Device& device);

// The device, as plans are made for it: no more than what limit_devices has said.
jit::Result<Device> device_of(int ordinal);
std::vector<std::tuple<int, int, int, int>> devices_here();  // the numbers of each Device

// From now on plans are made as if every device had no more than this, so that the schedules of other chips can be
// tried.
void limit_devices(int shared_memory_per_block, int largest_cluster);

}  // namespace jax_softmax
