// CUDA's driver, NVRTC and XLA for one test: they do nothing but count and remember. A process that preloads this
// library has it for libcuda.so.1, has its memory counted, and makes calls of handlers by the functions at the end.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace {

constexpr int kDevices = 3;
constexpr int kHopper = 2;  // the last one

std::atomic<int> compiled, loaded;
thread_local int allocations;

// What this thread has launched last.
struct Launch {
  void* kernel;
  void* stream;
  void* words[64];
};
thread_local Launch last_launch;
thread_local size_t words;  // of a kernel's parameter that are kept

}  // namespace

extern "C" {

// ---- Memory

void* __libc_malloc(size_t);
void* malloc(size_t bytes) {
  ++allocations;
  return __libc_malloc(bytes);
}

// ---- NVRTC, of which a compiled kernel is its source

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0; }
int nvrtcGetNumSupportedArchs(int* n) { return *n = 1, 0; }
int nvrtcGetSupportedArchs(int* architectures) { return *architectures = 80, 0; }
const char* nvrtcGetErrorString(int) { return ""; }
int nvrtcCreateProgram(void**, const char*, const char*, int, const char* const*, const char* const*) { return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcCompileProgram(void*, int, const char* const*) { return ++compiled, 0; }
int nvrtcGetPTXSize(void*, size_t* size) { return *size = 1, 0; }
int nvrtcGetPTX(void*, char*) { return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { return *size = 1, 0; }
int nvrtcGetCUBIN(void*, char*) { return 0; }
int nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 0, 0; }
int nvrtcGetProgramLog(void*, char*) { return 0; }

// ---- The driver, of two GPUs of compute capability 8.0 and one of 9.0. A tensor map is the array's address.

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int, const char** name) { return *name = "ERROR", 0; }
int cuGetErrorString(int, const char** text) { return *text = "", 0; }
int cuDeviceGetCount(int* count) { return *count = kDevices, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < kDevices ? 0 : 101; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? (device == kHopper ? 9 : 8) : attribute == 76 ? 0 : attribute == 16 ? 108 : 163 << 10;
  return 0;
}
int cuDevicePrimaryCtxRetain(void**, int) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuLibraryLoadData(void** library, const void*, int*, void**, unsigned, int*, void**, unsigned) {
  return *library = reinterpret_cast<void*>(++loaded), 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char*) { return *kernel = library, 0; }
int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }
int cuKernelGetAttribute(int* value, int, void*, int) { return *value = 0, 0; }
int cuKernelSetAttribute(int, int, void*, int) { return 0; }
int cuFuncLoad(void*) { return 0; }
int cuTensorMapEncodeTiled(void** map, int, unsigned, void* array, ...) { return *map = array, 0; }
int cuLaunchKernelEx(const unsigned* config, void* kernel, void** arguments, void**) {
  last_launch = {kernel, {}, {}};
  std::memcpy(&last_launch.stream, config + 8, sizeof(void*));
  std::memcpy(last_launch.words, arguments[0], words * sizeof(void*));
  return 0;
}

// ---- XLA

struct XLA_FFI_Error {
  std::string message;
};
struct Context {  // its type has other names in other versions of XLA
  int ordinal;
  void* stream;
};

static XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }
static XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<const Context*>(args->ctx)->stream;
  return nullptr;
}
static XLA_FFI_Error* get_ordinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = reinterpret_cast<const Context*>(args->ctx)->ordinal;
  return nullptr;
}

// A custom call in a program.
struct CustomCall {
  std::deque<std::vector<int64_t>> numbers;
  std::deque<std::string> texts;
  std::deque<XLA_FFI_Buffer> buffers;
  std::deque<XLA_FFI_ByteSpan> spans;
  std::deque<XLA_FFI_Array> arrays;
  std::deque<XLA_FFI_Scalar> scalars;
  std::vector<void*> operands, results, attributes;
  std::vector<XLA_FFI_ArgType> operand_types;
  std::vector<XLA_FFI_RetType> result_types;
  std::vector<XLA_FFI_AttrType> attribute_types;
  std::vector<XLA_FFI_ByteSpan*> names;

  XLA_FFI_ByteSpan* span(const char* text) {
    const std::string& kept = texts.emplace_back(text);
    return &spans.emplace_back(XLA_FFI_ByteSpan{kept.data(), kept.size()});
  }
  void add_attribute(const char* name, XLA_FFI_AttrType type, void* value) {
    names.push_back(span(name));
    attribute_types.push_back(type);
    attributes.push_back(value);
  }
};

CustomCall* new_call() { return new CustomCall; }
void add_buffer(CustomCall* call, bool is_result, int dtype, int64_t rank, const int64_t* shape) {
  std::vector<int64_t>& dims = call->numbers.emplace_back(shape, shape + rank);
  XLA_FFI_Buffer* buffer = &call->buffers.emplace_back(XLA_FFI_Buffer{
      XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(dtype), nullptr, rank, dims.data()});
  (is_result ? call->results : call->operands).push_back(buffer);
  if (is_result) {
    call->result_types.push_back(XLA_FFI_RetType_BUFFER);
  } else {
    call->operand_types.push_back(XLA_FFI_ArgType_BUFFER);
  }
}
// Attributes are added in the order of their names.
void add_text(CustomCall* call, const char* name, const char* text) {
  call->add_attribute(name, XLA_FFI_AttrType_STRING, call->span(text));
}
void add_number(CustomCall* call, const char* name, int64_t number) {
  int64_t* value = call->numbers.emplace_back(1, number).data();
  call->add_attribute(name, XLA_FFI_AttrType_SCALAR,
                      &call->scalars.emplace_back(XLA_FFI_Scalar{XLA_FFI_DataType_S64, value}));
}
void add_numbers(CustomCall* call, const char* name, int64_t count, const int64_t* numbers) {
  std::vector<int64_t>& kept = call->numbers.emplace_back(numbers, numbers + count);
  call->add_attribute(name, XLA_FFI_AttrType_ARRAY,
                      &call->arrays.emplace_back(XLA_FFI_Array{XLA_FFI_DataType_S64, kept.size(), kept.data()}));
}

// Executes a stage of the call. Operands and then results are at `address`, `address + step` and so on. Returns an
// error's message or null.
const char* run(const CustomCall* call, XLA_FFI_Handler* handler, int stage, int ordinal, void* stream,
                uintptr_t address, uintptr_t step) {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api api{};
    api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api.XLA_FFI_Error_Create = create_error;
    api.XLA_FFI_Stream_Get = get_stream;
    api.XLA_FFI_DeviceOrdinal_Get = get_ordinal;
    return api;
  }();
  for (auto* of : {&call->operands, &call->results}) {
    for (void* buffer : *of) {
      static_cast<XLA_FFI_Buffer*>(buffer)->data = reinterpret_cast<void*>(address);
      address += step;
    }
  }
  Context context{ordinal, stream};
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(&context);
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(stage);
  const auto of = [](const auto& all) { return const_cast<std::decay_t<decltype(all[0])>*>(all.data()); };
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(call->operands.size()), of(call->operand_types),
                of(call->operands)};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(call->results.size()), of(call->result_types),
                of(call->results)};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,         static_cast<int64_t>(call->attributes.size()),
                 of(call->attribute_types), of(call->names), of(call->attributes)};
  constexpr size_t kWordsOfMaps = 3 * 16;  // that Hopper's kernel is given before the addresses
  words = call->operands.size() + call->results.size() + 1 + (ordinal == kHopper ? kWordsOfMaps : 0);
  allocations = 0;
  const XLA_FFI_Error* error = handler(&frame);
  return error ? error->message.c_str() : nullptr;
}

const Launch* launched() { return &last_launch; }
int times_compiled() { return compiled; }
int times_loaded() { return loaded; }
int times_allocated() { return allocations; }  // by this thread in its last run

}  // extern "C"
