// The load and store functors: what happens to elements between memory and the arithmetic. A schedule asks them for
// whole packs of a row or for single elements, and never looks at memory itself. A fused variant of an operator is
// another functor here.
#pragma once

#include "cuda/pack.cuh"
#include "plan.h"

namespace jax_softmax::cuda {

// Where a row lies, as the kept index decides it.
struct RowOffset {
  int64_t element;
  int64_t mask;
};

__device__ __forceinline__ RowOffset offset_of(const Dims& dims, int size, int64_t index) {
  RowOffset offset{0, 0};
  for (int i = size - 1; i >= 0; --i) {
    const Dim& dim = dims.dim[i];
    const int64_t rest = i == 0 ? 0 : index / dim.extent;
    const int64_t here = index - rest * dim.extent;
    offset.element += here * dim.stride;
    offset.mask += here * dim.mask_stride;
    index = rest;
  }
  return offset;
}

// The operands of operator Op over storage type T. kExact promises that packs cover rows exactly and that there is no
// mask, so that no element needs a check.
template <class Op_, class T_, bool kMasked_>
struct Access {
  using Op = Op_;
  using T = T_;
  using M = typename Policy<T>::type;
  using C = typename M::Value;
  static constexpr bool kMasked = kMasked_;
  static constexpr int kInputs = Op::kInputs;
  static constexpr int kWidth = kPerPack<T>;

  const T* in[kInputs];
  const bool* mask;
  T* out;
  int64_t elements;  // of each operand

  // ---- single elements

  __device__ __forceinline__ void load(C (&v)[kInputs], RowOffset at) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) v[k] = widen(in[k][at.element]);
    if (kMasked && !mask[at.mask]) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) v[k] = Op::pad(k);
    }
  }

  __device__ __forceinline__ void store(C value, RowOffset at) const {
    out[at.element] = narrow<T>(kMasked && !mask[at.mask] ? Op::masked() : value);
  }

  // ---- packs of contiguous rows: pack j of a row holds its elements [j * kWidth - shift, (j + 1) * kWidth - shift),
  // where shift is how far the row's start lies beyond a multiple of 16 bytes.

  __device__ __forceinline__ int shift_of(RowOffset row) const {
    return static_cast<int>((reinterpret_cast<uintptr_t>(in[0] + row.element) % kPackBytes) / sizeof(T));
  }

  // Reads the pack that begins `first` elements into the row, which may be partly outside of it. Never reads outside
  // the operand.
  __device__ __forceinline__ Pack<T> load_raw(int k, RowOffset row, int64_t first) const {
    const int64_t begin = row.element + first;
    if (begin >= 0 && begin + kWidth <= elements) return load_pack(in[k] + begin);
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      pack.element[i] = begin + i >= 0 && begin + i < elements ? in[k][begin + i] : T{};
    }
    return pack;
  }

  // The bits of the pack's elements that are the row's own. The pack begins `first` elements into the row.
  static __device__ __forceinline__ unsigned inside_of(int64_t first, int64_t columns) {
    constexpr unsigned kAll = (1u << kWidth) - 1;
    if (first >= columns) return 0;
    unsigned inside = kAll;
    if (first < 0) inside &= kAll << -static_cast<int>(first);
    if (first + kWidth > columns) inside &= kAll >> static_cast<int>(first + kWidth - columns);
    return inside;
  }

  // Those that are not masked either.
  __device__ __forceinline__ unsigned kept_of(RowOffset row, int64_t mask_stride, int64_t first,
                                              int64_t columns) const {
    const unsigned inside = inside_of(first, columns);
    if constexpr (!kMasked) return inside;
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if ((inside >> i) & 1) kept |= static_cast<unsigned>(mask[row.mask + (first + i) * mask_stride]) << i;
    }
    return kept;
  }

  // Replaces what is masked or outside of the row by the operator's pads.
  static __device__ __forceinline__ void pad(Pack<T>& pack, int k, unsigned kept) {
    constexpr unsigned kAll = (1u << kWidth) - 1;
    if (kept == kAll) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (!((kept >> i) & 1)) pack.element[i] = narrow<T>(Op::pad(k));
    }
  }

  // Writes the elements of a pack that are the row's own; `kept` matters if there is a mask.
  template <bool kExact>
  __device__ __forceinline__ void store_values(C (&values)[kWidth], RowOffset row, int64_t first, int64_t columns,
                                               unsigned kept) const {
    T* p = out + row.element + first;
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (!((kept >> i) & 1)) values[i] = Op::masked();
      }
    }
    const Pack<T> pack = narrow_pack<T>(values);
    if (kExact || (first >= 0 && first + kWidth <= columns)) {
      store_pack(p, pack);
    } else {
      const unsigned inside = inside_of(first, columns);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if ((inside >> i) & 1) p[i] = pack.element[i];
      }
    }
  }
};

}  // namespace jax_softmax::cuda
