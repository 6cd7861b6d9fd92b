#include "jit/jit.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <system_error>
#include <thread>
#include <unordered_map>

#include "jit/hash.h"
#include "jit/headers.h"

namespace jax_softmax::jit {

class Kernel {
 public:
  CUkernel handle = nullptr;
};

namespace {

// ---- Compiles under way. A fork waits for them, because NVRTC's locks would stay taken in the child.

class Gate {
 public:
  // A compile is under way, from the one to the other: as std::shared_lock calls them.
  void lock_shared() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return forking_ == 0; });
    ++inside_;
  }
  void unlock_shared() {
    const std::lock_guard lock(mutex_);
    --inside_;
    changed_.notify_all();
  }
  void wait_until_empty() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return inside_ == 0; });
  }
  // Nobody enters, and nothing here is locked by another thread, until end_fork.
  void begin_fork() {
    std::unique_lock lock(mutex_);
    ++forking_;
    changed_.wait(lock, [&] { return inside_ == 0; });
    lock.release();
  }
  void end_fork() {
    --forking_;
    changed_.notify_all();
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int inside_ = 0, forking_ = 0;
};

// ---- A kernel, from its source to its handle

// What shapes every kernel alike.
Hash hash_of(const Nvrtc& nvrtc) {
  Hash hash;
  hash.add(JAX_SOFTMAX_VERSION).add(std::to_string(nvrtc.version()));
  for (int i = 0; i < kHeaders; ++i) hash.add(kHeaderNames[i]).add(kHeaderTexts[i]);
  return hash;
}

struct Entry {
  Source source;
  int compute_capability;

  std::mutex mutex;
  std::condition_variable ended;  // making it
  enum { kNew, kMaking, kMade } state = kNew;
  Result<std::string> binary = std::string();  // once made

  Kernel kernel;                    // null until loaded
  std::atomic<uint64_t> ready = 0;  // the devices, by ordinal, that may launch it
};

// Everything that is remembered. It is replaced whole, in a forked child because locks may be taken there by threads
// that are no more and the parent's kernels are of no use, and is never destroyed, because threads may outlive main.
struct State {
  State(const Nvrtc& nvrtc, Cache cache) : nvrtc(nvrtc), hash(hash_of(nvrtc)), cache(std::move(cache)) {}

  const Nvrtc nvrtc;
  const Hash hash;
  const Cache cache;

  std::shared_mutex mutex;  // of the two maps, not of what they point at
  std::map<int, std::unordered_map<std::string, std::unique_ptr<Entry>>> entries;  // by capability and code
  std::map<int, Device> devices;

  std::mutex queue_mutex;
  std::deque<Entry*> queue;  // prepared, but not begun
  unsigned workers = 0;
  bool stopped = false;
  std::condition_variable worker_ended;

  std::atomic<int64_t> compiled = 0, read = 0, written = 0;
  std::once_flag pruned;
};

std::atomic<Gate*> gate = new Gate;
std::atomic<State*> state = nullptr;

Error not_configured() { return {"the run-time compiler is not configured"}; }

void in_forked_child() {
  gate = new Gate;
  if (const State* s = state) state = new State(s->nvrtc, s->cache);
}

Result<Nvrtc::Compiled> compile(const Nvrtc& nvrtc, const Source& source, const std::vector<std::string>& options) {
  const std::shared_lock<Gate> under_way(*gate);
  return nvrtc.compile(source, options);
}

Result<std::string> read_or_compile(State& s, const Entry& entry) {
  const Result<std::vector<std::string>> options = s.nvrtc.options(entry.compute_capability);
  if (!options) return options.error;
  Hash hash = s.hash;
  for (const std::string& option : options.value) hash.add(option);
  const std::string key = hash.add(entry.source.code).hex();
  if (std::string binary = s.cache.read(key); !binary.empty()) {
    ++s.read;
    return binary;
  }
  const Result<Nvrtc::Compiled> compiled = compile(s.nvrtc, entry.source, options.value);
  if (!compiled) return compiled.error;
  ++s.compiled;
  if (s.cache.write(key, compiled.value.binary)) {
    ++s.written;
    std::call_once(s.pruned, [&] { s.cache.prune(); });
  }
  return compiled.value.binary;
}

Entry& entry_of(State& s, const Source& source, int compute_capability) {
  {
    const std::shared_lock lock(s.mutex);
    if (const auto map = s.entries.find(compute_capability); map != s.entries.end()) {
      if (const auto entry = map->second.find(source.code); entry != map->second.end()) return *entry->second;
    }
  }
  const std::lock_guard lock(s.mutex);
  std::unique_ptr<Entry>& entry = s.entries[compute_capability][source.code];
  if (!entry) {
    entry = std::make_unique<Entry>();
    entry->source = source;
    entry->compute_capability = compute_capability;
  }
  return *entry;
}

// Makes the binary, unless somebody has begun to.
void make(State& s, Entry& entry) {
  {
    const std::lock_guard lock(entry.mutex);
    if (entry.state != Entry::kNew) return;
    entry.state = Entry::kMaking;
  }
  const auto end = [&](auto state) {
    entry.state = state;
    entry.ended.notify_all();
  };
  try {
    Result<std::string> binary = read_or_compile(s, entry);
    const std::lock_guard lock(entry.mutex);
    entry.binary = std::move(binary);
    end(Entry::kMade);
  } catch (...) {  // no memory, say: the next one tries again
    const std::lock_guard lock(entry.mutex);
    end(Entry::kNew);
    throw;
  }
}

const Result<std::string>& made(State& s, Entry& entry) {
  for (;;) {
    make(s, entry);
    std::unique_lock lock(entry.mutex);
    entry.ended.wait(lock, [&] { return entry.state != Entry::kMaking; });
    if (entry.state == Entry::kMade) return entry.binary;
  }
}

void work(State& s) {
  for (;;) {
    Entry* entry;
    {
      const std::lock_guard lock(s.queue_mutex);
      if (s.queue.empty()) {
        --s.workers;
        s.worker_ended.notify_all();
        return;
      }
      entry = s.queue.front();
      s.queue.pop_front();
    }
    try {
      make(s, *entry);
    } catch (const std::exception&) {
      // Whoever needs the kernel makes it, and sees what is thrown.
    }
  }
}

// ---- Loading

// While a stream is captured, the driver refuses much of what loading takes, unless the thread says that it means it.
class Relaxed {
 public:
  explicit Relaxed(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  const Driver& driver_;
  int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

Error load(const Driver& d, const std::string& binary, Kernel* kernel) {
  CUlibrary library;
  Error error = d.check(d.cuLibraryLoadData(&library, binary.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                        "cuLibraryLoadData");
  if (!error) error = d.check(d.cuLibraryGetKernel(&kernel->handle, library, "kernel"), "cuLibraryGetKernel");
  return error;
}

// Allows all the shared memory and clusters that the device has, and ends the lazy loading, which a capture forbids.
Error make_ready(const Driver& d, const Device& device, CUkernel kernel) {
  CUdevice id;
  CUcontext context;
  int static_bytes = 0;
  CUfunction function;
  Error error = d.check(d.cuDeviceGet(&id, device.ordinal), "cuDeviceGet");
  // XLA's own context, which lives as long as the process.
  if (!error) error = d.check(d.cuDevicePrimaryCtxRetain(&context, id), "cuDevicePrimaryCtxRetain");
  if (!error) error = d.check(d.cuCtxPushCurrent(context), "cuCtxPushCurrent");
  if (error) return error;
  error = d.check(d.cuKernelGetFunction(&function, kernel), "cuKernelGetFunction");
  if (!error && d.cuFuncLoad) error = d.check(d.cuFuncLoad(function), "cuFuncLoad");
  if (!error) {
    error = d.check(d.cuKernelGetAttribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, id),
                    "cuKernelGetAttribute");
  }
  if (!error) {
    error = d.check(d.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           device.shared_memory_per_block - static_bytes, kernel, id),
                    "cuKernelSetAttribute(shared memory)");
  }
  if (!error && device.largest_cluster > 8) {
    error = d.check(d.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, id),
                    "cuKernelSetAttribute(cluster)");
  }
  d.cuCtxPopCurrent(&context);
  return error;
}

Error initialise() {
  if (!driver()) return driver().error;
  return driver().value.check(driver().value.cuInit(0), "cuInit");
}

}  // namespace

Error configure(const std::string& nvrtc, const std::string& cache_folder, int64_t cache_bytes) {
  Result<Nvrtc> opened = Nvrtc::open(nvrtc);
  if (!opened) return opened.error;
  state = new State(opened.value, Cache(cache_folder, cache_bytes));
  static const int registered [[maybe_unused]] =
      pthread_atfork([] { gate.load()->begin_fork(); }, [] { gate.load()->end_fork(); }, in_forked_child);
  return {};
}

Result<int> device_count() {
  if (Error error = initialise()) return error;
  int count = 0;
  if (Error error = driver().value.check(driver().value.cuDeviceGetCount(&count), "cuDeviceGetCount")) return error;
  return count;
}

Result<Device> device(int ordinal) {
  State* s = state;
  if (!s) return not_configured();
  {
    const std::shared_lock lock(s->mutex);
    if (const auto known = s->devices.find(ordinal); known != s->devices.end()) return known->second;
  }
  if (Error error = initialise()) return error;
  const Driver& d = driver().value;
  CUdevice id;
  Error error = d.check(d.cuDeviceGet(&id, ordinal), "cuDeviceGet");
  const auto get = [&](int attribute) {
    int value = 0;
    if (!error) error = d.check(d.cuDeviceGetAttribute(&value, attribute, id), "cuDeviceGetAttribute");
    return value;
  };
  const int major = get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  Device device;
  device.ordinal = ordinal;
  device.compute_capability = 10 * major + get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  device.multiprocessors = get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  device.shared_memory_per_block = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  // 8 blocks are what every chip with clusters can do, 16 what these can.
  device.largest_cluster = major < 9 ? 1 : major == 9 || device.compute_capability == 100 ? 16 : 8;
  if (error) return error;
  const std::lock_guard lock(s->mutex);
  s->devices[ordinal] = device;
  return device;
}

void prepare(const Source& source, int compute_capability) {
  State* s = state;
  if (!s) return;
  Entry& entry = entry_of(*s, source, compute_capability);
  {
    const std::lock_guard lock(entry.mutex);
    if (entry.state != Entry::kNew) return;
  }
  const std::lock_guard lock(s->queue_mutex);
  if (s->stopped) return;
  s->queue.push_back(&entry);
  if (s->workers < std::max(1u, std::thread::hardware_concurrency())) {
    try {
      std::thread(work, std::ref(*s)).detach();
      ++s->workers;
    } catch (const std::system_error&) {
      // No more threads: whoever needs the kernel makes it.
    }
  }
}

void stop() {
  if (State* s = state) {
    std::unique_lock lock(s->queue_mutex);
    s->stopped = true;
    s->queue.clear();
    s->worker_ended.wait(lock, [&] { return s->workers == 0; });
  }
  gate.load()->wait_until_empty();
}

Result<std::string> binary(const Source& source, int compute_capability) {
  State* s = state;
  if (!s) return not_configured();
  return made(*s, entry_of(*s, source, compute_capability));
}

Result<std::string> resources(const Source& source, int compute_capability) {
  const State* s = state;
  if (!s) return not_configured();
  Result<std::vector<std::string>> options = s->nvrtc.options(compute_capability);
  if (!options) return options.error;
  options.value.push_back("--ptxas-options=-v");
  const Result<Nvrtc::Compiled> compiled = compile(s->nvrtc, source, options.value);
  if (!compiled) return compiled.error;
  return compiled.value.log;
}

Result<const Kernel*> get(const Source& source, int ordinal) {
  State* s = state;
  if (!s) return not_configured();
  const Result<Device> device = jit::device(ordinal);
  if (!device) return device.error;
  Entry& entry = entry_of(*s, source, device.value.compute_capability);
  const uint64_t bit = ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if (entry.ready & bit) return &entry.kernel;

  const Result<std::string>& binary = made(*s, entry);
  if (!binary) return binary.error;
  const Driver& d = driver().value;
  const Relaxed relaxed(d);
  const std::lock_guard lock(entry.mutex);
  Error error;
  if (!entry.kernel.handle) error = load(d, binary.value, &entry.kernel);
  if (!error) error = make_ready(d, device.value, entry.kernel.handle);
  if (error) return Error{"a kernel could not be loaded (plan: " + source.plan + "): " + error.message};
  entry.ready |= bit;
  return &entry.kernel;
}

Error launch(const Kernel& kernel, const Launch& launch, CUstream stream, const void* argument) {
  if (launch.blocks < 1 || launch.blocks > INT32_MAX) {
    return Error{"a launch of " + std::to_string(launch.blocks) + " blocks: from 1 to 2^31 - 1 are allowed"};
  }
  CUlaunchAttribute attributes[3] = {};
  CUlaunchConfig config{static_cast<unsigned>(launch.blocks),
                        1,
                        1,
                        static_cast<unsigned>(launch.threads),
                        1,
                        1,
                        static_cast<unsigned>(launch.shared_bytes),
                        stream,
                        attributes,
                        0};
  if (launch.cluster > 1) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.cluster = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  const auto add_flag = [&](bool wanted, int id) {
    if (!wanted) return;
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = id;
    attribute.value.flag = 1;
  };
  add_flag(launch.cooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
  add_flag(launch.overlap, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
  void* arguments[] = {const_cast<void*>(argument)};
  const Driver& d = driver().value;
  // A CUkernel may stand where a CUfunction is asked for: the stream's context then says which.
  Error error = d.check(d.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel.handle), arguments, nullptr),
                        "cuLaunchKernelEx");
  if (error && launch.cooperative) {
    error.message += "; " + std::to_string(launch.blocks) +
                     " blocks that wait for one another must all fit at once into what this process may use of the GPU";
  }
  return error;
}

Result<Facts> facts() {
  const State* s = state;
  if (!s) return not_configured();
  Facts facts;
  facts.nvrtc_path = s->nvrtc.path();
  facts.nvrtc_version = s->nvrtc.version();
  facts.compiled = s->compiled;
  facts.read = s->read;
  facts.written = s->written;
  facts.cache_folder = s->cache.folder();
  facts.cache = s->cache.contents();
  return facts;
}

}  // namespace jax_softmax::jit
