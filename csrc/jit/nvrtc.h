// NVIDIA's run-time compiler, loaded from the path that Python found.
#pragma once

#include <string>
#include <vector>

#include "core/gpu.h"
#include "jit/driver.h"

namespace jax_softmax::jit {

// The device code, as text inside the library, which embed_headers.cmake writes: kernels include file i by the name
// kHeaderNames[i].
extern const char* const kHeaderNames[];
extern const char* const kHeaderTexts[];
extern const int kHeaders;

// NVRTC's types, declared here so that a build needs no CUDA toolkit.
using nvrtcProgram = struct _nvrtcProgram*;
using nvrtcResult = int;

class Nvrtc {
 public:
  // Loads the library, and its builtins, which some versions cannot find beside them.
  static Result<Nvrtc> open(const std::string& path);

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 13050 is 13.5

  // The options for a GPU of this compute capability (90 is 9.0): they make a cubin for it or, if NVRTC does not know
  // it, PTX for the newest older one, which the driver then compiles.
  Result<std::vector<std::string>> options(int compute_capability) const;

  struct Compiled {
    std::string binary;  // a cubin or PTX, as the options say
    std::string log;     // with the registers, spills and shared memory of a cubin; empty of one that was read
  };
  // Needs no GPU.
  Result<Compiled> compile(const Source& source, const std::vector<std::string>& options) const;

 private:
  std::string path_;
  int version_ = 0;
  std::vector<int> architectures_;

  const char* (*nvrtcGetErrorString)(nvrtcResult);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram*, const char* code, const char* name, int headers,
                                    const char* const* header_texts, const char* const* header_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram*);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram, int options, const char* const* option);
  nvrtcResult (*nvrtcGetPTXSize)(nvrtcProgram, size_t*);
  nvrtcResult (*nvrtcGetPTX)(nvrtcProgram, char*);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram, size_t*);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram, char*);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram, size_t*);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram, char*);
};

}  // namespace jax_softmax::jit
