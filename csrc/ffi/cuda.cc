#include "ffi/cuda.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>

#include "plan/plan.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

std::atomic<int> most_shared_memory{INT_MAX}, most_blocks{INT_MAX};

struct ReadyCalls {
  std::shared_mutex mutex;
  std::map<Key, std::unique_ptr<Ready>> calls;
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
  const Key key = key_of(call, packs, device.value, ordinal);
  *ready = find_ready(key);
  if (*ready) return ffi::Error::Success();

  Problem problem;
  if (const std::string message = problem_of(call, &problem); !message.empty()) {
    return invalid(describe(call) + ": " + message);
  }
  problem.footprint.packs = packs;
  const bool empty = problem.view.elements() == 0;
  if (empty && problem.cost.row_results > 0 && problem.view.rows > 0) return failed(call, "the rows have no elements");
  std::vector<Step<jit::Source>> steps;
  int64_t scratch = 0;
  if (!empty) {
    const std::optional<Plan> plan = make_plan(problem, device.value);
    if (!plan) return failed(call, "no kernel covers this shape and dtype");
    steps = steps_of(*plan, problem, call, device.value);
    scratch = scratch_bytes(*plan, problem);
  }
  const jit::Result<const Ready*> loaded = load_kernels(key, steps, scratch, device.value, ordinal);
  if (!loaded) return failed(call, loaded.error.message);
  *ready = loaded.value;
  return ffi::Error::Success();
}

// find_or_make, and a check that the call has the scratch memory that the kernels need: a last result.
ffi::Error make_ready(const Call& call, int ordinal, bool packs, const Ready** ready) {
  if (ffi::Error error = find_or_make(call, ordinal, packs, ready); error.failure()) return error;
  int64_t given = 0;
  if (call.results.size() > call.out.size() + cost_of(call.op).row_results) {
    given = bytes_of(call.results.back().dtype);
    for (const int64_t extent : call.results.back().shape) given *= extent;
  }
  const int64_t needed = (*ready)->scratch_bytes;
  if (needed <= given) return ffi::Error::Success();
  return failed(call, "its kernels need " + std::to_string(needed) + " bytes of scratch memory on this GPU, and the " +
                          "program has " + std::to_string(given) + ": lower or export it anew");
}

// Makes and loads what `execute` launches, before anything is captured into a CUDA graph. Buffers may have no addresses
// yet; XLA aligns them to packs.
ffi::Error initialize(int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Call call;
  Buffers buffers;
  if (ffi::Error error = read_operator(args, rets, attributes, &call, &buffers); error.failure()) return error;
  const Ready* ready;
  return make_ready(call, ordinal, true, &ready);
}

// A kernel's parameter: the words of `Operands`, in their order, but for the scratch memory and the rows.
std::vector<uint64_t> operand_words(const Call& call, const Buffers& buffers) {
  std::vector<uint64_t> words;
  const auto add = [&](const void* address) { words.push_back(reinterpret_cast<uintptr_t>(address)); };
  const Cost& cost = cost_of(call.op);
  auto operand = buffers.in.begin(), result = buffers.out.begin();
  for (int i = 0; i < cost.inputs; ++i) add(*operand++);
  for (const SideOperand& side : call.sides) add(side.role == Role::kIndex ? nullptr : *operand++);
  if (call.sides.empty()) add(nullptr);
  for (const int results : {static_cast<int>(call.out.size()), cost.row_results}) {
    for (int i = 0; i < results; ++i) add(*result++);
    if (results == 0) add(nullptr);
  }
  return words;
}

ffi::Error execute(jit::CUstream stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  Call call;
  Buffers buffers;
  if (ffi::Error error = read_operator(args, rets, attributes, &call, &buffers); error.failure()) return error;
  const std::vector<void*> of_elements(buffers.out.begin(), buffers.out.begin() + call.out.size());
  const bool packs = begin_with_packs(buffers.in) && begin_with_packs(of_elements);
  const Ready* ready;
  if (ffi::Error error = make_ready(call, ordinal, packs, &ready); error.failure()) return error;
  std::vector<uint64_t> words = operand_words(call, buffers);
  words.push_back(ready->scratch_bytes > 0 ? reinterpret_cast<uintptr_t>(buffers.out.back()) : 0);
  words.push_back(0);
  for (const auto& [kernel, launch, rows] : ready->steps) {
    words.back() = static_cast<uint64_t>(rows);
    if (const jit::Error error = jit::launch(*kernel, launch, stream, words.data())) {
      return failed(call, error.message);
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInitialize, returning_errors(initialize), bound_to_initialize());

// The same operands always lead to the same launches, so XLA may record them into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(kExecute, returning_errors(execute), bound_to_execute(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

bool begin_with_packs(const std::vector<void*>& addresses) {
  return std::all_of(addresses.begin(), addresses.end(),
                     [](void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes == 0; });
}

const Ready* find_ready(const Key& key) {
  ReadyCalls& ready = ready_calls();
  const std::shared_lock lock(ready.mutex);
  const auto found = ready.calls.find(key);
  return found == ready.calls.end() ? nullptr : found->second.get();
}

jit::Result<const Ready*> load_kernels(const Key& key, const std::vector<Step<jit::Source>>& steps,
                                       int64_t scratch_bytes, const Device& device, int ordinal) {
  auto loaded = std::make_unique<Ready>();
  loaded->scratch_bytes = scratch_bytes;
  // Side by side: they wait for the slowest alone.
  for (const auto& step : steps) jit::prepare(step.kernel, device.compute_capability);
  for (const auto& [source, launch, rows] : steps) {
    const jit::Result<const jit::LoadedKernel*> kernel = jit::get(source, ordinal);
    if (!kernel) return kernel.error;
    loaded->steps.push_back({kernel.value, launch, rows});
  }
  ReadyCalls& ready = ready_calls();
  const std::lock_guard lock(ready.mutex);
  std::unique_ptr<Ready>& entry = ready.calls[key];
  if (!entry) entry = std::move(loaded);
  return entry.get();
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
