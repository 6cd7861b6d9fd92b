#include "ffi/cuda.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>

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

bool begins_with_pack(const void* address) { return reinterpret_cast<uintptr_t>(address) % kPackBytes == 0; }

// ---- Keys

constexpr int64_t kAbsent = -1;

template <class T>
void add(Key* key, T value) {
  key->append(reinterpret_cast<const char*>(&value), sizeof value);
}
template <class Sequence>
void add_all(Key* key, const Sequence& values) {
  add(key, values.size());
  key->append(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(*values.begin()));
}
template <class Found>
void add_if_any(Key* key, std::string_view name, const Found& found) {
  add_all(key, name);
  if (!found.has_value()) return add(key, kAbsent);
  add_all(key, *found);
}

// ---- Calls that are ready

const Ready* find_ready(const Key& key) {
  ReadyCalls& ready = ready_calls();
  const std::shared_lock lock(ready.mutex);
  const auto found = ready.calls.find(key);
  return found == ready.calls.end() ? nullptr : found->second.get();
}

// Compiles and loads the kernels of a plan, and keeps them by the key.
jit::Result<const Ready*> load_kernels(const Key& key, const Planned& planned, int ordinal) {
  const jit::Result<Device> device = device_of(ordinal);
  auto loaded = std::make_unique<Ready>(Ready{planned.call, {}, planned.words});
  // Side by side: they wait for the slowest alone.
  for (const auto& step : planned.steps) jit::prepare(step.kernel, device.value.compute_capability);
  for (const auto& [source, launch, rows] : planned.steps) {
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

// ---- Calls of operators

// Which address each word of `Operands` has, in their order, but for the rows.
std::vector<int> words_of(const Call& call, bool has_scratch) {
  std::vector<int> words;
  int next = 0;
  const auto add = [&](int count, bool exist = true) {
    for (int i = 0; i < count; ++i) words.push_back(exist ? next++ : kNull);
  };
  const Cost& cost = cost_of(call.op);
  add(cost.inputs);
  for (const SideOperand& side : call.sides) add(1, side.role != Role::kIndex);
  if (call.sides.empty()) add(1, false);
  for (const int results : {static_cast<int>(call.out.size()), cost.row_results})
    add(at_least_one(results), results > 0);
  add(1, has_scratch);
  return words;
}

// The bytes of scratch memory that a program has for a call: a last result.
int64_t scratch_bytes_of(const Call& call) {
  if (call.results.size() == call.out.size() + cost_of(call.op).row_results) return 0;
  int64_t bytes = bytes_of(call.results.back().dtype);
  for (const int64_t extent : call.results.back().shape) bytes *= extent;
  return bytes;
}

ffi::Error plan(const XlaCall& xla_call, const Addresses& addresses, Planned* planned) {
  Call call;
  Buffers buffers;
  ffi::Error error = read_operator(xla_call.args, xla_call.rets, xla_call.attributes, &call, &buffers);
  if (error.failure()) return error;
  planned->call = describe(call);
  const jit::Result<Device> device = device_of(xla_call.ordinal);
  if (!device) return failed(planned->call, device.error.message);
  Problem problem;
  if (const std::string message = problem_of(call, &problem); !message.empty()) {
    return invalid(planned->call + ": " + message);
  }
  // Results of rows and scratch memory need not begin with packs.
  problem.footprint.packs =
      begin_with_packs({addresses.begin(), addresses.begin() + call.operands.size() + call.out.size()});
  if (problem.view.elements() == 0) {
    const bool none = problem.cost.row_results > 0 && problem.view.rows > 0;
    return none ? failed(planned->call, "the rows have no elements") : ffi::Error::Success();
  }
  const std::optional<Plan> plan = make_plan(problem, device.value);
  if (!plan) return failed(planned->call, "no kernel covers this shape and dtype");
  const int64_t needed = scratch_bytes(*plan, problem), given = scratch_bytes_of(call);
  if (needed > given) {
    const std::string bytes = std::to_string(needed) + " bytes of scratch memory on this GPU, and the program has ";
    const std::string message = "its kernels need " + bytes + std::to_string(given) + ": lower or export it anew";
    return failed(planned->call, message);
  }
  planned->steps = steps_of(*plan, problem, call, device.value);
  planned->words = words_of(call, needed > 0);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInitialize, returning_errors(initialize<Call, plan>), bound_to_initialize());

// The same operands always lead to the same launches, so XLA may record them into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(kExecute, returning_errors(execute<Call, plan>), bound_to_execute(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

ffi::Error failed(const std::string& call, const std::string& message) {
  return ffi::Error::Internal("jax_softmax: " + call + ": " + message);
}

bool begin_with_packs(const Addresses& addresses) {
  return std::all_of(addresses.begin(), addresses.end(), begins_with_pack);
}

void begin_key(const XlaCall& call, bool have_addresses, Key* key, Addresses* addresses) {
  key->clear();
  addresses->clear();
  const auto version = call.attributes.get<int64_t>("version");
  add(key, version.has_value() ? *version : kAbsent);
  for (const int number : {call.ordinal, most_shared_memory.load(), most_blocks.load()}) add(key, number);
  const auto add_buffer = [&](ffi::AnyBuffer buffer) {
    void* const address = have_addresses ? buffer.untyped_data() : nullptr;
    addresses->push_back(address);
    add(key, buffer.element_type());
    add(key, begins_with_pack(address));
    add_all(key, buffer.dimensions());
  };
  for (const size_t count : {call.args.size(), call.rets.size()}) add(key, count);
  for (size_t i = 0; i < call.args.size(); ++i) {
    if (const auto operand = call.args.get<ffi::AnyBuffer>(i); operand.has_value()) add_buffer(*operand);
  }
  for (size_t i = 0; i < call.rets.size(); ++i) {
    if (auto result = call.rets.get<ffi::AnyBuffer>(i); result.has_value()) add_buffer(**result);
  }
}

void add_attribute(const XlaCall& call, const char* name, const std::string&, Key* key) {
  add_if_any(key, name, call.attributes.get<std::string_view>(name));
}
void add_attribute(const XlaCall& call, const char* name, const std::vector<int64_t>&, Key* key) {
  add_if_any(key, name, call.attributes.get<ffi::Span<const int64_t>>(name));
}

ffi::Error find_or_make(const XlaCall& call, Planner plan, const Key& key, const Addresses& addresses,
                        const Ready** ready) {
  if ((*ready = find_ready(key))) return ffi::Error::Success();
  Planned planned;
  if (ffi::Error error = plan(call, addresses, &planned); error.failure()) return error;
  const jit::Result<const Ready*> loaded = load_kernels(key, planned, call.ordinal);
  if (!loaded) return failed(planned.call, loaded.error.message);
  *ready = loaded.value;
  return ffi::Error::Success();
}

constexpr size_t kWordsOfMap = sizeof(jit::CUtensorMap) / sizeof(uint64_t);

// Appends the tensor map of an array. It is made of the address at each execution, as XLA moves buffers.
jit::Error add_map(const MappedArray& array, void* address, std::vector<uint64_t>* parameter) {
  const jit::Result<jit::CUtensorMap> map = jit::tensor_map(array, address);
  if (!map) return map.error;
  uint64_t words[kWordsOfMap];
  std::memcpy(words, &map.value, sizeof words);
  parameter->insert(parameter->end(), std::begin(words), std::end(words));
  return {};
}

ffi::Error launch(const Ready& ready, const Addresses& addresses, jit::CUstream stream) {
  std::vector<uint64_t>& parameter = kept.parameter;
  for (const auto& [kernel, launch, rows] : ready.steps) {
    parameter.clear();
    jit::Error error;
    for (size_t k = 0; !error && k < launch.maps.size(); ++k) error = add_map(launch.maps[k], addresses[k], &parameter);
    for (const int word : ready.words) {
      parameter.push_back(word == kNull ? 0 : reinterpret_cast<uintptr_t>(addresses[word]));
    }
    parameter.push_back(static_cast<uint64_t>(rows));
    // A struct with maps is aligned as they are, and so longer than its last word.
    if (!launch.maps.empty()) parameter.resize(ceil_div(parameter.size(), kWordsOfMap) * kWordsOfMap);
    if (!error) error = jit::launch(*kernel, launch, stream, parameter.data());
    if (error) return failed(ready.call, error.message);
  }
  return ffi::Error::Success();
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
