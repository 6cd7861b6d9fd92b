// The FFI handlers, as the addresses that the Python side registers with XLA.
#pragma once

namespace jax_softmax {

void* cpu_handler();
void* cuda_handler();  // null where the CUDA kernels are not compiled in

}  // namespace jax_softmax
