// The FFI handlers, as the addresses that the Python side registers with XLA.
#pragma once

namespace jax_softmax {

void* cpu_handler();
void* cuda_handler();  // null where the CUDA kernels are not compiled in

// See cuda/cuda.h; nothing where the CUDA kernels are not compiled in.
void limit_cuda_device(int shared_memory_per_block, int largest_cluster);

}  // namespace jax_softmax
