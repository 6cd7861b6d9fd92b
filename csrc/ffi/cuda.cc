#include "ffi/cuda.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

constexpr size_t kMostParameterWords = 4096 / 8;  // of a kernel's parameters
constexpr int kMostRead = 31;                     // bits of kSidesRead (plan/source.cc)

std::atomic<int> most_shared_memory{INT_MAX}, most_blocks{INT_MAX};

// A call's kernels, loaded and ready to be launched. The key of a call is all that its plan depends on.
struct Ready {
  struct Step {
    const jit::LoadedKernel* kernel;
    Launch launch;
    int64_t rows;
  };
  std::vector<Step> steps;
  int64_t scratch_bytes;
};

using Key = std::vector<int64_t>;

Key key_of(const Call& call, const Device& device, int ordinal, bool packs) {
  Key key{static_cast<int64_t>(call.op),
          static_cast<int64_t>(call.in),
          packs,
          ordinal,
          device.shared_memory_per_block,
          device.largest_cluster,
          static_cast<int64_t>(call.shape.size()),
          static_cast<int64_t>(call.axes.size()),
          static_cast<int64_t>(call.out.size()),
          static_cast<int64_t>(call.sides.size()),
          static_cast<int64_t>(call.load.size())};
  key.insert(key.end(), call.shape.begin(), call.shape.end());
  key.insert(key.end(), call.axes.begin(), call.axes.end());
  for (const DType out : call.out) key.push_back(static_cast<int64_t>(out));
  for (const SideOperand& side : call.sides) {
    key.push_back(static_cast<int64_t>(side.role));
    key.push_back(static_cast<int64_t>(side.dtype));
    key.insert(key.end(), side.shape.begin(), side.shape.end());
  }
  key.insert(key.end(), call.load.begin(), call.load.end());
  key.insert(key.end(), call.store.begin(), call.store.end());
  return key;
}

// Kernels are never unloaded: a captured graph may launch them at any time.
class ReadyCalls {
 public:
  const Ready* find(const Key& key) const {
    const std::shared_lock lock(mutex_);
    const auto found = calls_.find(key);
    return found == calls_.end() ? nullptr : found->second.get();
  }
  const Ready* insert(const Key& key, Ready ready) {
    const std::lock_guard lock(mutex_);
    auto& entry = calls_[key];
    if (!entry) entry = std::make_unique<Ready>(std::move(ready));
    return entry.get();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<Key, std::unique_ptr<Ready>> calls_;
};

ReadyCalls& ready_calls() {
  static auto& calls = *new ReadyCalls;  // never destroyed: threads may outlive static objects
  return calls;
}

ffi::Error failed(const Call& call, const std::string& message) {
  return ffi::Error::Internal("jax_softmax: " + describe(call) + ": " + message);
}

// Sets the call's kernels: found again, or planned, compiled and loaded.
ffi::Error find_or_make(const Call& call, int ordinal, bool packs, const Ready** ready) {
  const jit::Result<Device> device = device_of(ordinal);
  if (!device) return failed(call, device.error.message);
  const Key key = key_of(call, device.value, ordinal, packs);
  *ready = ready_calls().find(key);
  if (*ready) return ffi::Error::Success();

  Problem problem;
  if (const std::string message = problem_of(call, &problem); !message.empty()) {
    return ffi::Error::InvalidArgument("jax_softmax: " + describe(call) + ": " + message);
  }
  if (problem.view.elements() == 0 && problem.cost.row_results > 0 && problem.view.rows > 0) {
    return failed(call, "the rows have no elements");
  }
  Ready loaded{};
  if (problem.view.elements() > 0) {
    problem.footprint.packs = packs;
    const std::optional<Planned> planned = plan_call(call, problem, device.value);
    if (!planned) return failed(call, "no kernel covers this shape and dtype");
    loaded.scratch_bytes = planned->scratch_bytes;
    // Side by side: they wait for the slowest alone.
    for (const PlannedStep& step : planned->steps) jit::prepare(step.source, device.value.compute_capability);
    for (const PlannedStep& step : planned->steps) {
      const jit::Result<const jit::LoadedKernel*> kernel = jit::get(step.source, ordinal);
      if (!kernel) return failed(call, kernel.error.message);
      loaded.steps.push_back({kernel.value, step.launch, step.rows});
    }
  }
  *ready = ready_calls().insert(key, std::move(loaded));
  return ffi::Error::Success();
}

// find_or_make, and a check that the call has the scratch memory that the kernels need.
ffi::Error make_ready(const Call& call, int ordinal, bool packs, int64_t scratch_bytes, const Ready** ready) {
  if (ffi::Error error = find_or_make(call, ordinal, packs, ready); error.failure()) return error;
  const int64_t needed = (*ready)->scratch_bytes;
  if (needed <= scratch_bytes) return ffi::Error::Success();
  return failed(call, "its kernels need " + std::to_string(needed) + " bytes of scratch memory on this GPU, and the " +
                          "program has " + std::to_string(scratch_bytes) + ": lower or export it anew");
}

// Makes and loads what `execute` launches, before anything is captured into a CUDA graph. Buffers may have no addresses
// yet; XLA aligns them to packs.
ffi::Error initialize(int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Call call;
  CallBuffers buffers;
  if (ffi::Error error = read_custom_call(args, rets, attributes, &call, &buffers); error.failure()) return error;
  const Ready* ready;
  return make_ready(call, ordinal, true, buffers.scratch_bytes, &ready);
}

// A kernel's parameter: the words of `Operands`, in their order.
std::vector<uint64_t> operand_words(const CallBuffers& buffers, const void* scratch, int64_t rows) {
  std::vector<uint64_t> words;
  const auto add = [&](const auto& pointers) {
    for (const auto p : pointers) words.push_back(reinterpret_cast<uintptr_t>(p));
    if (pointers.empty()) words.push_back(0);
  };
  add(buffers.in);
  add(buffers.side);
  add(buffers.out);
  add(buffers.row_results);
  words.push_back(reinterpret_cast<uintptr_t>(scratch));
  words.push_back(static_cast<uint64_t>(rows));
  return words;
}

ffi::Error execute(jit::CUstream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  Call call;
  CallBuffers buffers;
  if (ffi::Error error = read_custom_call(args, rets, attributes, &call, &buffers); error.failure()) return error;
  const auto begins_with_packs = [](const auto& pointers) {
    return std::all_of(pointers.begin(), pointers.end(),
                       [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kPackBytes == 0; });
  };
  const bool packs = begins_with_packs(buffers.in) && begins_with_packs(buffers.side) && begins_with_packs(buffers.out);
  const Ready* ready;
  if (ffi::Error error = make_ready(call, ordinal, packs, buffers.scratch_bytes, &ready); error.failure()) return error;
  for (const Ready::Step& step : ready->steps) {
    const auto words = operand_words(buffers, ready->scratch_bytes > 0 ? buffers.scratch : nullptr, step.rows);
    if (const jit::Error error = jit::launch(*step.kernel, step.launch, stream, words.data())) {
      return failed(call, error.message);
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInitialize, returning_errors(initialize), bound_to_initialize());

// The same operands always lead to the same launches, so XLA may record them into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(kExecute, returning_errors(execute), bound_to_execute(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

std::string problem_of(const Call& call, Problem* problem) {
  *problem = Problem{};
  std::vector<std::vector<int64_t>> shapes;
  for (const SideOperand& side : call.sides) shapes.push_back(side.shape);
  if (std::string message = make_view(call.shape, shapes, call.axes, &problem->view, &problem->sides);
      !message.empty()) {
    return message;
  }
  if (call.n_known > 0) return "there is no CUDA kernel that is given the results of rows";
  problem->cost = cost_of(call.op);
  if (split_lines(call.load).size() > static_cast<size_t>(problem->cost.inputs)) {
    return "`load` has more lines than the operator has operands";
  }
  const auto read = std::count_if(call.sides.begin(), call.sides.end(), [](const SideOperand& side) {
    return side.role == Role::kArray || side.role == Role::kIndex;
  });
  if (read > kMostRead) return "expressions read at most " + std::to_string(kMostRead) + " arrays and indices";
  const size_t parameter_words = call.sides.size() + call.out.size() + problem->cost.inputs + kMostRowResults + 2;
  if (parameter_words > kMostParameterWords) return "too many operands";
  const Cost& cost = problem->cost;
  problem->footprint.in_bytes = bytes_of(call.in);
  problem->footprint.out_bytes = bytes_of(call.out.empty() ? call.in : call.out[0]);
  problem->footprint.inputs = cost.inputs;
  problem->footprint.state_bytes = cost.state_bytes;
  problem->footprint.packs = true;
  problem->footprint.row_operands = cost.row_results > 0 || cost.row_numbers > 0;
  problem->float64 = arithmetic_of(call) == DType::kF64 ||
                     std::any_of(call.sides.begin(), call.sides.end(),
                                 [](const SideOperand& side) { return side.dtype == DType::kF64; });
  problem->masked = call.masked();
  problem->fused = !call.load.empty() || !call.store.empty();
  problem->identity_load = call.load.empty();
  return {};
}

std::optional<Planned> plan_call(const Call& call, const Problem& problem, const Device& device) {
  std::optional<Plan> plan = make_plan(problem, device);
  if (!plan) return {};
  Planned planned{{}, scratch_bytes(*plan, problem)};
  const std::string described = describe(*plan) + ", " + describe(call);
  for (const Step& step : steps_of(*plan, problem, device)) {
    planned.steps.push_back({{source_of(*plan, step, problem, call), described}, step.launch, step.rows});
  }
  return planned;
}

jit::Result<Device> device_of(int ordinal) {
  jit::Result<Device> found = jit::device(ordinal);
  Device& device = found.value;
  device.shared_memory_per_block = std::min(device.shared_memory_per_block, most_shared_memory.load());
  device.largest_cluster = std::min(device.largest_cluster, most_blocks.load());
  return found;
}

std::vector<std::tuple<int, int, int, int>> devices_here() {
  std::vector<std::tuple<int, int, int, int>> devices;
  const jit::Result<int> count = jit::device_count();
  for (int ordinal = 0; count && ordinal < count.value; ++ordinal) {
    const jit::Result<Device> found = device_of(ordinal);
    const auto [capability, multiprocessors, shared_memory, cluster] = found.value;
    if (found) devices.emplace_back(capability, multiprocessors, shared_memory, cluster);
  }
  return devices;
}

void limit_devices(int shared_memory_per_block, int largest_cluster) {
  most_shared_memory = shared_memory_per_block;
  most_blocks = largest_cluster;
}

void* cuda_initialize_handler() { return reinterpret_cast<void*>(+kInitialize); }
void* cuda_execute_handler() { return reinterpret_cast<void*>(+kExecute); }

}  // namespace jax_softmax
