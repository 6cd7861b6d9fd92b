// Instructions of warps and blocks, of sm_80 and newer. The tests' emulator on the host has its own of these, and
// shares all other files of attention with the GPU.
#pragma once

#include "attention/geometry.h"
#include "device/functions.cuh"

namespace jax_softmax::device {

using Address = uint32_t;  // of shared memory

inline constexpr float kInfinity = Approximate::kInfinity;

__device__ __forceinline__ Address shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return static_cast<Address>(__cvta_generic_to_shared(memory));
}
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ void barrier() { __syncthreads(); }
__device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
__device__ __forceinline__ bool any_of_warp(bool x) { return __any_sync(~0u, x); }
__device__ __forceinline__ float exp2_of(float x) { return Approximate::exp2(x); }
__device__ __forceinline__ float log2_of(float x) { return __log2f(x); }

// Off by 2^-11, for what is rounded to bfloat16.
__device__ __forceinline__ float coarse_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Begins a copy to shared memory: of zeros, unless the source exists.
template <int bytes>
__device__ __forceinline__ void begin_copy(Address to, const void* from, bool exists) {
  const int read = exists ? bytes : 0;
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(read), "n"(bytes));
  }
}
// Ends a group: the copies begun since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int n>
__device__ __forceinline__ void wait_for_all_but_last() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

template <int words>
__device__ __forceinline__ void read_shared(float (&to)[words], Address from) {
  if constexpr (words == 4) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(from));
  } else {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(from));
  }
}

__device__ __forceinline__ void write_shared(Address to, const float (&from)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]), "f"(from[1]), "f"(from[2]),
               "f"(from[3])
               : "memory");
}

// Four matrices of 8 rows of 16 bytes: lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix
// two neighbours, those of columns 2 (l % 4) of row l / 4; transposed, of rows 2 (l % 4) of column l / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}

// c += a b, of 16 x 16 and 16 x 8 numbers of 16 bits, or of 16 x 8 and 8 x 8 of 32 bits, of which the ten highest of
// the mantissa count.
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<BFloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                       uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<Float16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<float>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Half a unit of the last bit that counts is added. So does cvt.rna.tf32, by four instructions instead of two.
__device__ __forceinline__ uint32_t rounded_to_tf32(float x) {
  const float power = __uint_as_float(__float_as_uint(x) & 0xff800000);  // of two, with x's sign; of NaN, infinity
  return __float_as_uint(fmaf(power, 0x1p-11f, x));
}

// The bits of two neighbours.
template <class T>
__device__ __forceinline__ auto narrowed(float low, float high) {
  if constexpr (sizeof(T) == 4) {
    return static_cast<uint64_t>(__float_as_uint(high)) << 32 | __float_as_uint(low);
  } else {
    return static_cast<uint32_t>(Pair<T>::narrow(low, high));
  }
}

// Two neighbours in half a word: of each the nearest integer of 8 bits.
__device__ __forceinline__ uint16_t saturated_to_int8(int low, int high) {
  uint32_t word;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(word) : "r"(high), "r"(low));
  return static_cast<uint16_t>(word);
}

// A value in device memory, which no kernel writes meanwhile.
template <class T>
__device__ __forceinline__ auto read_global(const T* from) {
  if constexpr (sizeof(T) == 1) {
    const uint8_t bits = __ldg(reinterpret_cast<const unsigned char*>(from));
    return Elements<T>::widen(reinterpret_cast<const T&>(bits));
  } else if constexpr (sizeof(T) == 2) {
    const uint16_t bits = __ldg(reinterpret_cast<const unsigned short*>(from));
    return Elements<T>::widen(reinterpret_cast<const T&>(bits));
  } else {
    const int bits = __ldg(reinterpret_cast<const int*>(from));
    return Elements<T>::widen(reinterpret_cast<const T&>(bits));
  }
}

// The same from shared memory.
template <class T>
__device__ __forceinline__ auto read_shared_as(Address from) {
  return Elements<T>::widen(*static_cast<const T*>(__cvta_shared_to_generic(from)));
}

// One of two neighbours, aligned to both: one instruction reads them.
template <class T>
__device__ __forceinline__ auto read_one_of_two(Address from, int which) {
  if constexpr (sizeof(T) == 4) {
    return read_shared_as<T>(from + which * 4);
  } else if constexpr (sizeof(T) == 2) {
    const unsigned bits = *static_cast<const unsigned*>(__cvta_shared_to_generic(from));
    const uint16_t own = static_cast<uint16_t>(which ? bits >> 16 : bits);
    return Elements<T>::widen(reinterpret_cast<const T&>(own));
  } else {
    const unsigned bits = *static_cast<const uint16_t*>(__cvta_shared_to_generic(from));
    const uint8_t own = static_cast<uint8_t>(which ? bits >> 8 : bits);
    return Elements<T>::widen(reinterpret_cast<const T&>(own));
  }
}

}  // namespace jax_softmax::device
