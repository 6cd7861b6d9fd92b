// Copies from device memory to shared memory that go on while threads do something else.
#pragma once

#include "device/pack.cuh"

namespace jax_softmax::device {

// Copies 16 bytes to shared memory without passing through registers, where the chip can. Completed by
// wait_for_copies. The last cache reads the whole cache line: of tiles, the rest is what blocks nearby are about to ask
// for.
__device__ __forceinline__ void copy_pack(Pack* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *shared = load_pack(global);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace jax_softmax::device
