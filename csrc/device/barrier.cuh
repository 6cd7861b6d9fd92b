// Copies from device memory to shared memory that go on while threads do something else; barriers in shared memory
// that count arrivals and bytes, and what is sent to them.
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
// Until the barrier's phase of that parity is complete, and what its arrivals have written here is there to be read.
__device__ __forceinline__ void wait(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// The same where other blocks of the cluster write.
__device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// What the blocks of a cluster write to each other's shared memory is counted by a barrier in that which they write to,
// so that nobody waits for more than that. All threads begin an exchange, in which a block is sent so many bytes, once;
// before a thread sends any, it waits until all blocks have begun, since only then is there a memory to write to.
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
// Writes a word at the same place as here, and counts it at the barrier's.
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
