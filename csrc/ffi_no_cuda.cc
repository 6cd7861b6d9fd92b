#include "ffi.h"

namespace jax_softmax {

void* cuda_handler() { return nullptr; }

}  // namespace jax_softmax
