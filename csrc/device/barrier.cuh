// Asynchronous copies from device memory to shared memory; barriers in shared memory that count arrivals and bytes; and
// words that are sent to the blocks of a cluster.
#pragma once

#include "device/pack.cuh"

namespace jax_softmax::device {

// Begins to copy 16 bytes to shared memory, past the registers where the chip can; wait_for_copies ends it. The L2
// cache reads the whole cache line: of tiles, blocks nearby are about to ask for the rest.
__device__ __forceinline__ void copy_pack(Pack* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *shared = load_words<kPackBytes>(global);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits until the barrier's phase of that parity is complete; what was written before its arrivals can then be read.
__device__ __forceinline__ void wait(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// The same, of what other blocks of the cluster have written.
__device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// An exchange: the blocks of a cluster write to each other's shared memory, in which a barrier counts the bytes that
// arrive: `bytes` in each block. All threads begin the exchange once, and wait until all blocks have begun before they
// send: only then does the other blocks' memory exist.
__device__ __forceinline__ void begin_exchange(uint64_t* barrier, int bytes) {
  if (threadIdx.x == 0) {
    init_barrier(barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    arrive_and_expect(barrier, bytes);
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_until_all_have_begun() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes a word to `place` in another block's shared memory, and counts it at `barrier` there.
__device__ __forceinline__ void send_word(const void* place, uint64_t word, int block, const uint64_t* barrier) {
  unsigned there, barrier_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(shared_address(barrier)), "r"(block));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(there), "l"(word),
               "r"(barrier_there)
               : "memory");
}
#endif

}  // namespace jax_softmax::device
