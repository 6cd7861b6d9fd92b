// Instructions of sm_90a: copies by tensor maps, barriers in shared memory, and products of warpgroups. The tests'
// emulator on the host has its own of these.
#pragma once

#include "attention/warp.cuh"

namespace jax_softmax::device {

// The warpgroup of the thread, the same for all lanes, as the compiler has to know.
__device__ __forceinline__ int own_warpgroup() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0); }

// The registers that each thread of the warpgroup may have from here on.
template <int n>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

// Warpgroups take turns: each waits until the one before has given it one.
__device__ __forceinline__ void take_turn(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(warpgroup + 1) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(warpgroup + 1) : "memory");
}

// ---- Barriers in shared memory: a phase is complete when all have arrived and all expected bytes are there.

__device__ __forceinline__ void init_barrier(Address barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After it, and a barrier of all threads, copies may count at the barriers.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One lane arrives for all of the warp, when all have come here: none may still wait for what this lets others change.
__device__ __forceinline__ void arrive_for_warp(Address barrier) {
  __syncwarp();
  if (lane() == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(Address barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives when the copies that the thread has begun (begin_copy) are there.
__device__ __forceinline__ void arrive_after_copies(Address barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of that parity is complete. At first the phase before the first one is.
__device__ __forceinline__ void wait(Address barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Begins to copy the map's box from these indices on, innermost first, and counts its bytes at the barrier. What does
// not exist is 0. 16 bytes c of row r, of 128 bytes each, come to c ^ r % 8.
__device__ __forceinline__ void begin_copy_of_box(Address to, const attention::TensorMap& map,
                                                  const int (&at)[attention::kMapDims], Address barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
      : "memory");
}

// ---- Products of a warpgroup: 64 x 16 by 16 x columns, added to accumulators as a warp's are, of 16 rows for each
// warp. They are asynchronous: `fence_products` before the first of a group, and `commit_products` after its last one.

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all products but those of the last groups; what they add to is `c`, which may be read only then.
template <int later = 0, int n>
__device__ __forceinline__ void wait_for_products(float (&c)[n][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(later) : "memory");
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}

// add_rows: a b^T, both in shared memory, instead of c if `begins`. add_columns: a b, a of registers.
template <class T, int columns>
struct WarpgroupProduct;

#define JAX_SOFTMAX_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_SOFTMAX_NAMES_16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_SOFTMAX_NAMES_32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_SOFTMAX_NAMES_48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_SOFTMAX_NAMES_64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_SOFTMAX_NAMES_80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_SOFTMAX_NAMES_96 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define JAX_SOFTMAX_NAMES_112 \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_SOFTMAX_4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define JAX_SOFTMAX_16(n) JAX_SOFTMAX_4(n), JAX_SOFTMAX_4(n + 1), JAX_SOFTMAX_4(n + 2), JAX_SOFTMAX_4(n + 3)
#define JAX_SOFTMAX_NAMES_OF_32 JAX_SOFTMAX_NAMES_0
#define JAX_SOFTMAX_REGISTERS_OF_32 JAX_SOFTMAX_16(0)
#define JAX_SOFTMAX_NAMES_OF_48 JAX_SOFTMAX_NAMES_0 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_SOFTMAX_REGISTERS_OF_48 JAX_SOFTMAX_16(0), JAX_SOFTMAX_4(4), JAX_SOFTMAX_4(5)
#define JAX_SOFTMAX_NAMES_OF_64 JAX_SOFTMAX_NAMES_0 ", " JAX_SOFTMAX_NAMES_16
#define JAX_SOFTMAX_REGISTERS_OF_64 JAX_SOFTMAX_16(0), JAX_SOFTMAX_16(4)
#define JAX_SOFTMAX_NAMES_OF_96 JAX_SOFTMAX_NAMES_0 ", " JAX_SOFTMAX_NAMES_16 ", " JAX_SOFTMAX_NAMES_32
#define JAX_SOFTMAX_REGISTERS_OF_96 JAX_SOFTMAX_16(0), JAX_SOFTMAX_16(4), JAX_SOFTMAX_16(8)
#define JAX_SOFTMAX_NAMES_OF_128 \
  JAX_SOFTMAX_NAMES_0 ", " JAX_SOFTMAX_NAMES_16 ", " JAX_SOFTMAX_NAMES_32 ", " JAX_SOFTMAX_NAMES_48
#define JAX_SOFTMAX_REGISTERS_OF_128 JAX_SOFTMAX_16(0), JAX_SOFTMAX_16(4), JAX_SOFTMAX_16(8), JAX_SOFTMAX_16(12)
#define JAX_SOFTMAX_NAMES_OF_192                                                                    \
  JAX_SOFTMAX_NAMES_0 ", " JAX_SOFTMAX_NAMES_16 ", " JAX_SOFTMAX_NAMES_32 ", " JAX_SOFTMAX_NAMES_48 \
                      ", " JAX_SOFTMAX_NAMES_64 ", " JAX_SOFTMAX_NAMES_80
#define JAX_SOFTMAX_REGISTERS_OF_192 \
  JAX_SOFTMAX_16(0), JAX_SOFTMAX_16(4), JAX_SOFTMAX_16(8), JAX_SOFTMAX_16(12), JAX_SOFTMAX_16(16), JAX_SOFTMAX_16(20)
#define JAX_SOFTMAX_NAMES_OF_256 JAX_SOFTMAX_NAMES_OF_192 ", " JAX_SOFTMAX_NAMES_96 ", " JAX_SOFTMAX_NAMES_112
#define JAX_SOFTMAX_REGISTERS_OF_256 JAX_SOFTMAX_REGISTERS_OF_192, JAX_SOFTMAX_16(24), JAX_SOFTMAX_16(28)
#define JAX_SOFTMAX_PRODUCT(T, type, columns, i0, i1, i2, i3, i4)                                                     \
  template <>                                                                                                         \
  struct WarpgroupProduct<T, columns> {                                                                               \
    static __device__ __forceinline__ void add_rows(float (&c)[columns / 8][4], uint64_t a, uint64_t b, int begins) { \
      asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, " i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns    \
                   "k16.f32." type "." type " {" JAX_SOFTMAX_NAMES_OF_##columns "}, " i0 ", " i1                      \
                                                                                ", adds, 1, 1, 0, 0;\n}"              \
                   : JAX_SOFTMAX_REGISTERS_OF_##columns                                                               \
                   : "l"(a), "l"(b), "r"(begins));                                                                    \
    }                                                                                                                 \
    static __device__ __forceinline__ void add_columns(float (&c)[columns / 8][4], const uint32_t (&a)[4],            \
                                                       uint64_t b) {                                                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                              \
                   " {" JAX_SOFTMAX_NAMES_OF_##columns "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", 1, 1, 1, 1;"     \
                   : JAX_SOFTMAX_REGISTERS_OF_##columns                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
    }                                                                                                                 \
  };
#define JAX_SOFTMAX_PRODUCTS(columns, ...)                    \
  JAX_SOFTMAX_PRODUCT(BFloat16, "bf16", columns, __VA_ARGS__) \
  JAX_SOFTMAX_PRODUCT(Float16, "f16", columns, __VA_ARGS__)
JAX_SOFTMAX_PRODUCTS(32, "%16", "%17", "%18", "%19", "%20")
JAX_SOFTMAX_PRODUCTS(48, "%24", "%25", "%26", "%27", "%28")
JAX_SOFTMAX_PRODUCTS(64, "%32", "%33", "%34", "%35", "%36")
JAX_SOFTMAX_PRODUCTS(96, "%48", "%49", "%50", "%51", "%52")
JAX_SOFTMAX_PRODUCTS(128, "%64", "%65", "%66", "%67", "%68")
JAX_SOFTMAX_PRODUCTS(192, "%96", "%97", "%98", "%99", "%100")
JAX_SOFTMAX_PRODUCTS(256, "%128", "%129", "%130", "%131", "%132")

}  // namespace jax_softmax::device
