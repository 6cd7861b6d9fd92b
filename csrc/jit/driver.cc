#include "jit/driver.h"

#include <dlfcn.h>

namespace jax_softmax::jit {

namespace {

constexpr int kOldestVersion = 12000;  // the first with cuLibrary*

Result<Driver> open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    return Error{
        "the NVIDIA driver's library libcuda.so.1 was not found: install the driver, or in a container start "
        "it with its GPUs"};
  }
  Driver driver{};
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function) missing = name;
  };
  find(driver.cuFuncLoad, "cuFuncLoad");
  missing = nullptr;
  find(driver.cuDriverGetVersion, "cuDriverGetVersion");
  if (!driver.cuDriverGetVersion || driver.cuDriverGetVersion(&driver.version) != 0) {
    return Error{"the NVIDIA driver does not say which CUDA it supports"};
  }
  if (driver.version < kOldestVersion) {
    return Error{"the NVIDIA driver supports CUDA " + cuda_version(driver.version) + ", and " +
                 cuda_version(kOldestVersion) + " or newer is needed: update the driver"};
  }
  find(driver.cuInit, "cuInit");
  find(driver.cuGetErrorName, "cuGetErrorName");
  find(driver.cuGetErrorString, "cuGetErrorString");
  find(driver.cuDeviceGetCount, "cuDeviceGetCount");
  find(driver.cuDeviceGet, "cuDeviceGet");
  find(driver.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  find(driver.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  find(driver.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  find(driver.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
  find(driver.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  find(driver.cuLibraryLoadData, "cuLibraryLoadData");
  find(driver.cuLibraryGetKernel, "cuLibraryGetKernel");
  find(driver.cuKernelGetFunction, "cuKernelGetFunction");
  find(driver.cuKernelGetAttribute, "cuKernelGetAttribute");
  find(driver.cuKernelSetAttribute, "cuKernelSetAttribute");
  find(driver.cuLaunchKernelEx, "cuLaunchKernelEx");
  find(driver.cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
  if (missing) return Error{std::string("the NVIDIA driver has no function ") + missing + ": update the driver"};
  return driver;
}

}  // namespace

Error Driver::check(CUresult result, const char* what) const {
  if (result == 0) return {};
  const char *name = nullptr, *text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return Error{std::string(what) + ": " + (name ? name : std::to_string(result)) + " (" + (text ? text : "unknown") +
               ")"};
}

const Result<Driver>& driver() {
  static const auto* const result = new Result<Driver>(open_driver());  // never destroyed: threads may outlive main
  return *result;
}

std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace jax_softmax::jit
