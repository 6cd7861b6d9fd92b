// The CUDA kernels, as the FFI handler sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace jax_softmax::cuda {

struct Operands {
  const void* in[2];
  const bool* mask;  // null without a mask
  void* out;
  void* scratch;  // null, or scratch_bytes
};

// Enqueues the work on the stream; makes the plan for the current device.
cudaError_t launch(Op op, DType dtype, const View& view, const Operands& operands, cudaStream_t stream);

// The same, given the plan: one instance for each operator and storage type, each in a file of its own.
template <Op op, DType dtype>
cudaError_t launch_plan(const CudaPlan& plan, const View& view, const Operands& operands, cudaStream_t stream);

// From now on plans are made as if every device had no more than this, so that the schedules of other chips can be
// tried.
void limit_device(int shared_memory_per_block, int largest_cluster);

}  // namespace jax_softmax::cuda
