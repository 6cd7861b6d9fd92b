// Compiled kernels: from memory, else from disk, else by NVRTC. All functions may be called from any thread. None
// touches a GPU but device_count, device, get and launch.
#pragma once

#include <cstdint>
#include <string>

#include "core/gpu.h"
#include "jit/cache.h"
#include "jit/driver.h"
#include "jit/nvrtc.h"

namespace jax_softmax::jit {

// To be called before all others. `nvrtc` is the library's path; with an empty `cache_folder` nothing is kept on disk.
// A later call forgets all kernels, for tests.
Error configure(const std::string& nvrtc, const std::string& cache_folder, int64_t cache_bytes);

Result<int> device_count();
Result<Device> device(int ordinal);

// Begins to compile a kernel in another thread, unless that has begun; as many at once as there are processors.
void prepare(const Source& source, int compute_capability);

// Waits for compiles under way and drops those not begun: the process must not end, and unload NVRTC, during a compile.
void stop();

// The cubin (or PTX: see Nvrtc::options) of a kernel; needs no GPU.
Result<Nvrtc::Compiled> get_binary(const Source& source, int compute_capability);

// A kernel that is loaded on a device and may be launched there, also while a stream is captured. Never unloaded.
class LoadedKernel;
Result<const LoadedKernel*> get(const Source& source, int ordinal);

// The tensor map of an array at this address, with swizzles of 128 bytes; it needs no device.
Result<CUtensorMap> tensor_map(const MappedArray& array, void* address);

// `argument` points at the kernel's only parameter, a struct passed by value.
Error launch(const LoadedKernel& kernel, const Launch& launch, CUstream stream, const void* argument);

// What happened since `configure`, and where.
struct Facts {
  std::string nvrtc_path;
  int nvrtc_version = 0;
  int64_t compiled = 0, read = 0, written = 0;  // kernels that NVRTC made, that came from disk, that went there
  std::string cache_folder;
  Cache::Contents cache;
};
Result<Facts> facts();

}  // namespace jax_softmax::jit
