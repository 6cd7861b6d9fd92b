// CUDA's driver API, as far as it is used: declared here so that a build needs no CUDA toolkit, and loaded from libcuda
// when first used. Names, numbers and layouts are those of cuda.h.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace jax_softmax::jit {

// Errors are values: nothing here throws, other than std::bad_alloc.

// What went wrong, in words for the user; empty if nothing did.
struct [[nodiscard]] Error {
  std::string message;
  explicit operator bool() const { return !message.empty(); }
};

// A value, or the error that kept it from being made.
template <class T>
struct [[nodiscard]] Result {
  T value{};
  Error error;

  Result(T value) : value(std::move(value)) {}
  Result(Error error) : error(std::move(error)) {}
  explicit operator bool() const { return !error; }
};

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;

constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;

constexpr int CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
constexpr int CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14;

constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;

constexpr int CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2;
constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
constexpr int CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct alignas(8) CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int flag;
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72);

constexpr int CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1;
constexpr int CU_TENSOR_MAP_SWIZZLE_128B = 3;
constexpr int CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2;

struct alignas(64) CUtensorMap {
  char opaque[128];
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};
static_assert(sizeof(CUlaunchConfig) == 56);

struct Driver {
  int version;  // the newest CUDA that it supports: 12040 is 12.4

  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult, const char** name);
  CUresult (*cuGetErrorString)(CUresult, const char** text);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice*, int ordinal);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*cuCtxPushCurrent)(CUcontext);
  CUresult (*cuCtxPopCurrent)(CUcontext*);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CUresult (*cuLibraryLoadData)(CUlibrary*, const void* code, int* jit_options, void** jit_values, unsigned jit_count,
                                int* library_options, void** library_values, unsigned library_count);
  CUresult (*cuLibraryGetKernel)(CUkernel*, CUlibrary, const char* name);
  CUresult (*cuKernelGetFunction)(CUfunction*, CUkernel);
  CUresult (*cuKernelGetAttribute)(int* value, int attribute, CUkernel, CUdevice);
  CUresult (*cuKernelSetAttribute)(int attribute, int value, CUkernel, CUdevice);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void** arguments, void** extra);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap*, int type, unsigned rank, void* address, const uint64_t* extents,
                                     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                     int interleave, int swizzle, int promotion, int fill);
  CUresult (*cuFuncLoad)(CUfunction);  // since 12.4; null before

  // "what: NAME (description)", or no error.
  Error check(CUresult, const char* what) const;
};

// The driver, or why there is none that will do. Does not initialise it, so that a process may still fork.
const Result<Driver>& driver();

// "12.4" of 12040.
std::string cuda_version(int version);

}  // namespace jax_softmax::jit
