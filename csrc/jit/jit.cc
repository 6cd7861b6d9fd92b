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

namespace jax_softmax::jit {

class LoadedKernel {
 public:
  CUkernel handle = nullptr;
};

namespace {

// Held shared by compiles, and exclusively by a fork: NVRTC's locks, if taken, would stay so in the child.
std::atomic<std::shared_mutex*> compiling = new std::shared_mutex;

// ---- A kernel, from its source to its handle

// Of what all kernels depend on.
Hash hash_of(const Nvrtc& nvrtc) {
  Hash hash;
  hash.add(JAX_SOFTMAX_VERSION).add(std::to_string(nvrtc.version()));
  for (int i = 0; i < kHeaders; ++i) hash.add(kHeaderNames[i]).add(kHeaderTexts[i]);
  return hash;
}

struct KernelEntry {
  Source source;
  int compute_capability;

  std::atomic<bool> begun = false;  // a thread compiles it, or will
  std::mutex mutex;                 // held while it is compiled or loaded
  bool has_binary = false;
  Result<Nvrtc::Compiled> compiled = Nvrtc::Compiled();

  LoadedKernel kernel;              // null until loaded
  std::atomic<uint64_t> ready = 0;  // the devices, by ordinal, that may launch it
};

// All state. `configure` and a forked child replace it whole: in the child, threads that do not exist may hold its
// locks, and the parent's kernels are of no use. It is never destroyed, because threads may outlive main.
struct Compiler {
  Compiler(const Nvrtc& nvrtc, Cache cache) : nvrtc(nvrtc), hash(hash_of(nvrtc)), cache(std::move(cache)) {}

  const Nvrtc nvrtc;
  const Hash hash;
  const Cache cache;

  std::shared_mutex mutex;  // of the two maps, not of the entries
  std::map<int, std::unordered_map<std::string, std::unique_ptr<KernelEntry>>> entries;  // by capability and code
  std::map<int, Device> devices;

  std::mutex queue_mutex;
  std::deque<KernelEntry*> queue;  // of `prepare`, not begun
  unsigned workers = 0;
  bool stopped = false;
  std::condition_variable worker_ended;

  std::atomic<int64_t> compiled = 0, read = 0, written = 0;
  std::once_flag pruned;
};

std::atomic<Compiler*> current = nullptr;

Error not_configured() { return {"the run-time compiler is not configured"}; }

void in_forked_child() {
  compiling = new std::shared_mutex;
  if (const Compiler* compiler = current) current = new Compiler(compiler->nvrtc, compiler->cache);
}

Result<Nvrtc::Compiled> read_or_compile(Compiler& compiler, const KernelEntry& entry) {
  const Result<std::vector<std::string>> options = compiler.nvrtc.options(entry.compute_capability);
  if (!options) return options.error;
  Hash hash = compiler.hash;
  for (const std::string& option : options.value) hash.add(option);
  const std::string key = hash.add(entry.source.code).hex();
  if (std::string binary = compiler.cache.read(key); !binary.empty()) {
    ++compiler.read;
    return Nvrtc::Compiled{binary, ""};
  }
  Result<Nvrtc::Compiled> compiled = [&] {
    const std::shared_lock under_way(*compiling.load());
    return compiler.nvrtc.compile(entry.source, options.value);
  }();
  if (!compiled) return compiled;
  ++compiler.compiled;
  if (compiler.cache.write(key, compiled.value.binary)) {
    ++compiler.written;
    std::call_once(compiler.pruned, [&] { compiler.cache.prune(); });
  }
  return compiled;
}

KernelEntry& entry_of(Compiler& compiler, const Source& source, int compute_capability) {
  {
    const std::shared_lock lock(compiler.mutex);
    if (const auto map = compiler.entries.find(compute_capability); map != compiler.entries.end()) {
      if (const auto entry = map->second.find(source.code); entry != map->second.end()) return *entry->second;
    }
  }
  const std::lock_guard lock(compiler.mutex);
  std::unique_ptr<KernelEntry>& entry = compiler.entries[compute_capability][source.code];
  if (!entry) {
    entry = std::make_unique<KernelEntry>();
    entry->source = source;
    entry->compute_capability = compute_capability;
  }
  return *entry;
}

// Reads or compiles the entry's binary, once. If that throws (no memory, say), the next call tries again.
const Result<Nvrtc::Compiled>& binary_of(Compiler& compiler, KernelEntry& entry, const std::unique_lock<std::mutex>&) {
  entry.begun = true;
  if (!entry.has_binary) entry.compiled = read_or_compile(compiler, entry);
  entry.has_binary = true;
  return entry.compiled;
}

void run_worker(Compiler& compiler) {
  for (;;) {
    KernelEntry* entry;
    {
      const std::lock_guard lock(compiler.queue_mutex);
      if (compiler.queue.empty()) {
        --compiler.workers;
        compiler.worker_ended.notify_all();
        return;
      }
      entry = compiler.queue.front();
      compiler.queue.pop_front();
    }
    try {
      const std::unique_lock lock(entry->mutex, std::try_to_lock);
      if (lock) binary_of(compiler, *entry, lock);
    } catch (const std::exception&) {
      // The thread that needs the kernel compiles it, and gets the exception.
    }
  }
}

// ---- Loading

// Lets the thread load kernels while a stream is captured, which the driver refuses otherwise.
class Relaxed {
 public:
  explicit Relaxed(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  const Driver& driver_;
  int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

Error load(const Driver& d, const std::string& binary, LoadedKernel* kernel) {
  CUlibrary library;
  Error error = d.check(d.cuLibraryLoadData(&library, binary.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                        "cuLibraryLoadData");
  if (!error) error = d.check(d.cuLibraryGetKernel(&kernel->handle, library, "kernel"), "cuLibraryGetKernel");
  return error;
}

// Allows all shared memory and clusters of the device, and loads the code, which a capture forbids to do lazily.
Error load_on_device(const Driver& d, const Device& device, int ordinal, CUkernel kernel) {
  CUdevice id;
  CUcontext context;
  int static_bytes = 0;
  CUfunction function;
  Error error = d.check(d.cuDeviceGet(&id, ordinal), "cuDeviceGet");
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
  current = new Compiler(opened.value, Cache(cache_folder, cache_bytes));
  static const int registered [[maybe_unused]] =
      pthread_atfork([] { compiling.load()->lock(); }, [] { compiling.load()->unlock(); }, in_forked_child);
  return {};
}

Result<int> device_count() {
  if (Error error = initialise()) return error;
  int count = 0;
  if (Error error = driver().value.check(driver().value.cuDeviceGetCount(&count), "cuDeviceGetCount")) return error;
  return count;
}

Result<Device> device(int ordinal) {
  Compiler* compiler = current;
  if (!compiler) return not_configured();
  {
    const std::shared_lock lock(compiler->mutex);
    if (const auto known = compiler->devices.find(ordinal); known != compiler->devices.end()) return known->second;
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
  Device device{};
  device.compute_capability = 10 * major + get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  device.multiprocessors = get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  device.shared_memory_per_block = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  // 8 blocks are what every chip with clusters can do, 16 what these can.
  device.largest_cluster = major < 9 ? 1 : major == 9 || device.compute_capability == 100 ? 16 : 8;
  if (error) return error;
  const std::lock_guard lock(compiler->mutex);
  compiler->devices[ordinal] = device;
  return device;
}

void prepare(const Source& source, int compute_capability) {
  Compiler* compiler = current;
  if (!compiler) return;
  KernelEntry& entry = entry_of(*compiler, source, compute_capability);
  if (entry.begun.exchange(true)) return;
  const std::lock_guard lock(compiler->queue_mutex);
  if (compiler->stopped) return;
  compiler->queue.push_back(&entry);
  if (compiler->workers < std::max(1u, std::thread::hardware_concurrency())) {
    try {
      std::thread(run_worker, std::ref(*compiler)).detach();
      ++compiler->workers;
    } catch (const std::system_error&) {
      // No more threads: the thread that needs the kernel compiles it.
    }
  }
}

void stop() {
  if (Compiler* compiler = current) {
    std::unique_lock lock(compiler->queue_mutex);
    compiler->stopped = true;
    compiler->queue.clear();
    compiler->worker_ended.wait(lock, [&] { return compiler->workers == 0; });
  }
  const std::unique_lock none_under_way(*compiling.load());
}

Result<Nvrtc::Compiled> get_binary(const Source& source, int compute_capability) {
  Compiler* compiler = current;
  if (!compiler) return not_configured();
  KernelEntry& entry = entry_of(*compiler, source, compute_capability);
  return binary_of(*compiler, entry, std::unique_lock(entry.mutex));
}

Result<const LoadedKernel*> get(const Source& source, int ordinal) {
  Compiler* compiler = current;
  if (!compiler) return not_configured();
  const Result<Device> device = jit::device(ordinal);
  if (!device) return device.error;
  KernelEntry& entry = entry_of(*compiler, source, device.value.compute_capability);
  const uint64_t bit = ordinal < 64 ? uint64_t{1} << ordinal : 0;
  if (entry.ready & bit) return &entry.kernel;

  const std::unique_lock lock(entry.mutex);
  const Result<Nvrtc::Compiled>& compiled = binary_of(*compiler, entry, lock);
  if (!compiled) return compiled.error;
  const Driver& d = driver().value;
  const Relaxed relaxed(d);
  Error error;
  if (!entry.kernel.handle) error = load(d, compiled.value.binary, &entry.kernel);
  if (!error) error = load_on_device(d, device.value, ordinal, entry.kernel.handle);
  if (error) return Error{"a kernel could not be loaded (plan: " + source.plan + "): " + error.message};
  entry.ready |= bit;
  return &entry.kernel;
}

Result<CUtensorMap> tensor_map(const MappedArray& array, void* address) {
  const Driver& d = driver().value;
  constexpr uint32_t kDims = std::tuple_size_v<decltype(array.extents)>, kOnes[kDims] = {1, 1, 1, 1, 1};
  uint64_t strides[kDims];
  for (uint64_t bytes = sizeof(uint16_t), dim = 0; dim < kDims; ++dim) strides[dim] = bytes *= array.extents[dim];
  CUtensorMap map;
  Error error = d.check(d.cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, kDims, address,
                                                 array.extents.data(), strides, array.box.data(), kOnes, 0,
                                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, 0),
                        "cuTensorMapEncodeTiled");
  if (error) return error;
  return map;
}

Error launch(const LoadedKernel& kernel, const Launch& launch, CUstream stream, const void* argument) {
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
  add_flag(launch.overlaps, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
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
  const Compiler* compiler = current;
  if (!compiler) return not_configured();
  Facts facts;
  facts.nvrtc_path = compiler->nvrtc.path();
  facts.nvrtc_version = compiler->nvrtc.version();
  facts.compiled = compiler->compiled;
  facts.read = compiler->read;
  facts.written = compiler->written;
  facts.cache_folder = compiler->cache.folder();
  facts.cache = compiler->cache.contents();
  return facts;
}

}  // namespace jax_softmax::jit
