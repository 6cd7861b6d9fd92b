// The load and store functors: what happens to elements between memory and the arithmetic. A schedule asks them for
// packs of a row or for single elements, and never interprets memory itself. A fused variant of an operator is another
// functor here.
#pragma once

#include "cuda/divisor.cuh"
#include "cuda/pack.cuh"
#include "plan.h"

namespace jax_softmax::cuda {

// Where a row, or an element of it, lies.
struct Offset {
  int64_t element;
  int64_t mask;
};
static_assert(sizeof(Offset) == kOffsetBytes);

__device__ __forceinline__ Offset operator+(Offset a, Offset b) { return {a.element + b.element, a.mask + b.mask}; }

// Of the index-th combination of the first `size` dimensions' indices, the innermost varying fastest.
__device__ __forceinline__ Offset offset_of(const Dims& dims, int size, int64_t index) {
  Offset offset{0, 0};
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

// Dimensions whose indices are counted by one number below 2^31.
struct Strided {
  int size;
  Divisor extent[kMaxDims];
  int64_t stride[kMaxDims];
  int64_t mask_stride[kMaxDims];

  Strided() = default;
  explicit Strided(const Dims& dims) : size(dims.size) {
    for (int i = 0; i < size; ++i) {
      extent[i] = Divisor(dims.dim[i].extent);
      stride[i] = dims.dim[i].stride;
      mask_stride[i] = dims.dim[i].mask_stride;
    }
  }
  __device__ __forceinline__ unsigned innermost() const { return size > 0 ? extent[size - 1].divisor : 1; }
  // Where the index-th combination lies; *innermost becomes the index of the last dimension.
  __device__ __forceinline__ Offset at(unsigned index, unsigned* innermost) const {
    *innermost = index;
    if (size == 1) return {index * stride[0], index * mask_stride[0]};
    Offset offset{0, 0};
    for (int i = size - 1; i >= 0; --i) {
      const unsigned rest = i == 0 ? 0 : extent[i].divide(index);
      const unsigned here = index - rest * extent[i].divisor;
      if (i == size - 1) *innermost = here;
      offset.element += here * stride[i];
      offset.mask += here * mask_stride[i];
      index = rest;
    }
    return offset;
  }
};

template <class Op_, class T_, bool kMasked_>
struct Access {
  using Op = Op_;
  using T = T_;
  using M = typename Op::Policy;
  using C = typename M::Value;
  static constexpr bool kMasked = kMasked_;
  static constexpr int kInputs = Op::kInputs;
  static constexpr int kWidth = kPerPack<T>;
  // The packs' elements, of all operands side by side.
  using Values = C[kWidth][kInputs];

  const T* in[kInputs];
  const bool* mask;
  T* out;
  int64_t elements;  // of each operand

  // ---- single elements

  __device__ __forceinline__ void load(C (&v)[kInputs], Offset at) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) v[k] = Elements<T>::widen(in[k][at.element]);
    pad_if_masked(v, at);
  }

  __device__ __forceinline__ void pad_if_masked(C (&v)[kInputs], Offset at) const {
    if (kMasked && !mask[at.mask]) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) v[k] = Op::pad(k);
    }
  }

  // What is stored for an element.
  __device__ __forceinline__ T result(C value, Offset at) const {
    return Elements<T>::narrow(kMasked && !mask[at.mask] ? Op::masked() : value);
  }

  // ---- packs of contiguous rows: pack j of a row holds its elements [j * kWidth - shift, (j + 1) * kWidth - shift),
  // where shift is how far the row's start lies beyond a multiple of `boundary` bytes, a power of 2, from the pack on
  // that the operand begins in. `first` is the row's element that a pack begins with, which is negative or beyond the
  // end where the pack is partly or wholly outside of the row.

  __device__ __forceinline__ int shift_of(Offset row, int boundary) const {
    const auto begin = static_cast<unsigned>(reinterpret_cast<uintptr_t>(in[0]) % kPackBytes / sizeof(T));
    return static_cast<int>((begin + static_cast<unsigned>(row.element)) & (boundary / sizeof(T) - 1));
  }

  // Whether the pack lies within the operand, so that it can be read whole, whatever row its elements belong to.
  __device__ __forceinline__ bool whole_in_memory(Offset row, int64_t first) const {
    const int64_t begin = row.element + first;
    return begin >= 0 && begin + kWidth <= elements;
  }

  // The same in 32 bits for the packs of one row of fewer than 2^31 elements, and that it is not wholly before the row.
  struct MemoryRange {
    int least, most;
    __device__ __forceinline__ bool holds(int first) const { return first >= least && first <= most; }
  };
  __device__ __forceinline__ MemoryRange memory_range(Offset row, int columns) const {
    const int64_t behind = elements - row.element - kWidth;
    return {row.element < kWidth ? -static_cast<int>(row.element) : 1 - kWidth,
            behind < columns ? static_cast<int>(behind) : columns};
  }

  __device__ __forceinline__ Pack load_parts(int k, Offset row, int64_t first) const {
    const int64_t begin = row.element + first;
    return load_elements(in[k] + begin, bits_within(begin, elements));
  }

  // The bits of the elements of a pack that lie in [0, size), the first of them at `first`.
  static __device__ __forceinline__ unsigned bits_within(int64_t first, int64_t size) {
    unsigned bits = kAllBits<T>;
    if (first < 0) bits &= kAllBits<T> << (first > -kWidth ? -static_cast<int>(first) : kWidth);
    if (first + kWidth > size) bits &= first < size ? kAllBits<T> >> static_cast<int>(first + kWidth - size) : 0;
    return bits;
  }

  // The bits of a pack's elements that are the row's own and not masked.
  __device__ __forceinline__ unsigned kept_bits(Offset row, int64_t mask_stride, int64_t first, int64_t columns) const {
    const unsigned inside = bits_within(first, columns);
    if constexpr (!kMasked) return inside;
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if ((inside >> i) & 1) kept |= static_cast<unsigned>(mask[row.mask + (first + i) * mask_stride]) << i;
    }
    return kept;
  }

  // A pack of what stands in for elements that are masked or outside of the row.
  static __device__ __forceinline__ Pack pad_pack(int k) {
    C pads[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pads[i] = Op::pad(k);
    return Elements<T>::narrow(pads);
  }

  // The maximum of the elements of a pack.
  static __device__ __forceinline__ C max_element(const Pack& pack) {
    C v[kWidth];
    Elements<T>::widen(v, pack);
    C m = v[0];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) m = M::max(m, v[i]);
    return m;
  }

  static __device__ __forceinline__ C sum_of_terms(const Relative<M>& relative, const Pack (&packs)[kInputs]) {
    Values values;
    widen(values, packs);
    C sum = Op::term(relative, values[0]);
#pragma unroll
    for (int i = 1; i < kWidth; ++i) sum += Op::term(relative, values[i]);
    return sum;
  }

  static __device__ __forceinline__ void widen(Values& values, const Pack (&packs)[kInputs]) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      C v[kWidth];
      Elements<T>::widen(v, packs[k]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i][k] = v[i];
    }
  }

  static __device__ __forceinline__ Pack finish(const typename Op::Row& row, const Pack (&packs)[kInputs]) {
    Values values;
    widen(values, packs);
    C result[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result[i] = Op::finish(row, values[i]);
    return Elements<T>::narrow(result);
  }

  // Writes the elements of a pack that are the row's own; `kept` matters if there is a mask.
  __device__ __forceinline__ void store_parts(const Pack& pack, Offset row, int64_t first, int64_t columns,
                                              unsigned kept) const {
    store_elements(out + row.element + first, with_masked(pack, kept), bits_within(first, columns));
  }

  // The pack with what masked elements become, where they are not in `kept`.
  static __device__ __forceinline__ Pack with_masked(const Pack& pack, unsigned kept) {
    if constexpr (kMasked) {
      C masked[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) masked[i] = Op::masked();
      return select_elements<T>(kept, pack, Elements<T>::narrow(masked));
    } else {
      return pack;
    }
  }
};

}  // namespace jax_softmax::cuda
