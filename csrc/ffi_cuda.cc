#include "cuda/cuda.h"
#include "ffi.h"
#include "ffi_call.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

ffi::Error run(cudaStream_t stream, ffi::AnyBuffer first, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
               ffi::RemainingRets more, std::string_view op, ffi::Span<const int64_t> axes) {
  Call call;
  if (ffi::Error error = make_call(first, rest, *out, more, op, axes, &call); error.failure()) return error;
  if (call.view.rows * call.view.columns == 0) return ffi::Error::Success();
  const cudaError_t status = cuda::launch(call.op, call.dtype, call.view,
                                          {{call.in[0], call.in[1]}, call.mask, call.out, call.scratch}, stream);
  if (status != cudaSuccess) {
    return ffi::Error::Internal("jax_softmax: " + describe(op, first) + ": CUDA error: " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

// The same operands always lead to the same launches, so XLA may record them into a CUDA graph.
XLA_FFI_DEFINE_HANDLER(kHandler, run,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .RemainingRets()
                           .Attr<std::string_view>("op")
                           .Attr<ffi::Span<const int64_t>>("axes"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* cuda_handler() { return reinterpret_cast<void*>(+kHandler); }

void limit_cuda_device(int shared_memory_per_block, int largest_cluster) {
  cuda::limit_device(shared_memory_per_block, largest_cluster);
}

}  // namespace jax_softmax
