// Kernels made for a call: from memory, then from disk, then by NVRTC.
//
// Everything here may be called from any thread. No GPU is touched before `device` or `get`.
#pragma once

#include <cstdint>
#include <string>

#include "core/gpu.h"
#include "jit/cache.h"
#include "jit/driver.h"
#include "jit/nvrtc.h"

namespace jax_softmax::jit {

// Must have been called before anything else here. `nvrtc` is the library's path; an empty `cache_folder` keeps nothing
// on disk. A later call forgets every kernel, which is for tests.
Error configure(const std::string& nvrtc, const std::string& cache_folder, int64_t cache_bytes);

Result<int> device_count();
Result<Device> device(int ordinal);

// Begins to make a kernel in another thread, unless it is made or being made; as many at once as there are processors.
void prepare(const Source& source, int compute_capability);

// Ends what `prepare` began. To be called before the process ends, which tears NVRTC down below its compiles.
void stop();

// The cubin (or PTX: see Nvrtc::options) of a kernel; needs no GPU. Waits for whoever is already making it.
Result<Nvrtc::Compiled> compiled(const Source& source, int compute_capability);

// A kernel that is loaded on a device and may be launched there, also while a stream is captured. Never unloaded.
class LoadedKernel;
Result<const LoadedKernel*> get(const Source& source, int ordinal);

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
