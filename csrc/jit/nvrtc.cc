#include "jit/nvrtc.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <type_traits>

namespace jax_softmax::jit {

namespace fs = std::filesystem;

namespace {

constexpr int kOldestVersion = 12010;  // the first that compiles every kernel
constexpr const char kPtxOption[] = "--gpu-architecture=compute_";

// Writes a kernel and its headers to a temporary folder, for a report of a failure; the kernel's path, or empty.
std::string save(const Source& source) {
  std::error_code failed;
  std::string folder = (fs::temp_directory_path(failed) / "jax_softmax-XXXXXX").string();
  if (failed || !mkdtemp(folder.data())) return "";
  const auto write = [&](const fs::path& file, const char* text) {
    fs::create_directories(file.parent_path(), failed);
    std::ofstream(file) << text;
  };
  for (int i = 0; i < kHeaders; ++i) write(fs::path(folder) / kHeaderNames[i], kHeaderTexts[i]);
  const fs::path file = fs::path(folder) / "kernel.cu";
  write(file, source.code.c_str());
  return file.string();
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

}  // namespace

Result<Nvrtc> Nvrtc::open(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return Error{std::string("NVRTC could not be loaded: ") + dlerror()};
  Nvrtc nvrtc;
  nvrtc.path_ = path;
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function) missing = name;
  };
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  nvrtcResult (*nvrtcGetNumSupportedArchs)(int*);
  nvrtcResult (*nvrtcGetSupportedArchs)(int*);
  find(nvrtcVersion, "nvrtcVersion");
  find(nvrtcGetNumSupportedArchs, "nvrtcGetNumSupportedArchs");
  find(nvrtcGetSupportedArchs, "nvrtcGetSupportedArchs");
  find(nvrtc.nvrtcGetErrorString, "nvrtcGetErrorString");
  find(nvrtc.nvrtcCreateProgram, "nvrtcCreateProgram");
  find(nvrtc.nvrtcDestroyProgram, "nvrtcDestroyProgram");
  find(nvrtc.nvrtcCompileProgram, "nvrtcCompileProgram");
  find(nvrtc.nvrtcGetPTXSize, "nvrtcGetPTXSize");
  find(nvrtc.nvrtcGetPTX, "nvrtcGetPTX");
  find(nvrtc.nvrtcGetCUBINSize, "nvrtcGetCUBINSize");
  find(nvrtc.nvrtcGetCUBIN, "nvrtcGetCUBIN");
  find(nvrtc.nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize");
  find(nvrtc.nvrtcGetProgramLog, "nvrtcGetProgramLog");
  if (missing) return Error{"NVRTC (" + path + ") has no function " + missing};

  int major = 0, minor = 0, count = 0;
  nvrtcVersion(&major, &minor);
  nvrtc.version_ = 1000 * major + 10 * minor;
  if (nvrtc.version_ < kOldestVersion) {
    return Error{"NVRTC " + cuda_version(nvrtc.version_) + " (" + path +
                 ") is too old: " + cuda_version(kOldestVersion) + " or newer is needed"};
  }
  nvrtcGetNumSupportedArchs(&count);
  nvrtc.architectures_.resize(count);
  nvrtcGetSupportedArchs(nvrtc.architectures_.data());
  std::sort(nvrtc.architectures_.begin(), nvrtc.architectures_.end());

  const fs::path builtins =
      fs::path(path).parent_path() / ("libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor));
  dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);  // where they are elsewhere, NVRTC looks for them itself
  return nvrtc;
}

Result<std::vector<std::string>> Nvrtc::options(int compute_capability) const {
  const auto above = std::upper_bound(architectures_.begin(), architectures_.end(), compute_capability);
  if (above == architectures_.begin()) {
    return Error{"NVRTC " + cuda_version(version_) + " (" + path_ + ") makes no code for compute capability " +
                 std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10)};
  }
  const int newest = *(above - 1);
  const std::string target = newest == compute_capability ? "--gpu-architecture=sm_" : std::string(kPtxOption);
  // Of 9.0 with the instructions of that chip alone, which PTX for newer ones must not have.
  const char* const own = newest == compute_capability && newest == 90 ? "a" : "";
  std::vector<std::string> options{target + std::to_string(newest) + own, "--std=c++17", "--fmad=false",
                                   "--device-as-default-execution-space", "--ptxas-options=-v"};
  // From 12.9 on it keeps what it compiled in the driver's cache as well; ours is enough.
  if (version_ >= 12090) options.push_back("--no-cache");
  return options;
}

Result<Nvrtc::Compiled> Nvrtc::compile(const Source& source, const std::vector<std::string>& options) const {
  nvrtcProgram program;
  nvrtcResult status =
      nvrtcCreateProgram(&program, source.code.c_str(), "kernel.cu", kHeaders, kHeaderTexts, kHeaderNames);
  if (status != 0) return Error{std::string("NVRTC: ") + nvrtcGetErrorString(status)};

  struct Destroyed {
    const Nvrtc& nvrtc;
    nvrtcProgram program;
    ~Destroyed() { nvrtc.nvrtcDestroyProgram(&program); }
  } const destroyed{*this, program};
  std::vector<const char*> words;
  for (const std::string& option : options) words.push_back(option.c_str());
  status = nvrtcCompileProgram(program, static_cast<int>(words.size()), words.data());

  size_t size = 0;
  const auto get = [&](auto get_size, auto get_bytes) {
    if (get_size(program, &size) != 0) return std::string();
    std::string bytes(size, '\0');
    get_bytes(program, bytes.data());
    return bytes;
  };
  std::string binary;
  if (status == 0) {
    const bool ptx = options.front().rfind(kPtxOption, 0) == 0;
    binary = ptx ? get(nvrtcGetPTXSize, nvrtcGetPTX) : get(nvrtcGetCUBINSize, nvrtcGetCUBIN);
  }
  std::string log = get(nvrtcGetProgramLogSize, nvrtcGetProgramLog);
  if (!log.empty() && log.back() == '\0') log.pop_back();
  if (!binary.empty()) return Compiled{std::move(binary), std::move(log)};

  const std::string file = save(source);
  return Error{"NVRTC " + cuda_version(version_) + " (" + path_ +
               ") could not compile a kernel: " + nvrtcGetErrorString(status) +
               ". This is a mistake in jax_softmax; please report it with these lines.\n" +
               "driver: " + (driver() ? "CUDA " + cuda_version(driver().value.version) : driver().error.message) +
               "\n" + "plan: " + source.plan + "\n" + "options: " + joined(options) + "\n" +
               (file.empty() ? "" : "source: " + file + "\n") + log};
}

}  // namespace jax_softmax::jit
