// Where rows and elements lie in the operands and in the side operands: constants of a kernel, other than the outermost
// batch extent.
#pragma once

#include "device/types.cuh"
#include "geometry/operands.h"

namespace jax_softmax::device {

// A dimension of the view, and its strides in the operands and in each side operand.
template <int kSides>
struct SidedDim {
  int64_t extent;
  int64_t stride;
  int64_t side[kSides > 0 ? kSides : 1];
};

// An element's offsets in the operands and in each side operand.
template <int kSides>
struct ElementOffsets {
  int64_t element;
  int64_t side[kSides > 0 ? kSides : 1];

  // The offsets `index` elements further along a dimension.
  __device__ __forceinline__ ElementOffsets along(const SidedDim<kSides>& dim, int64_t index) const {
    ElementOffsets result = *this;
    result.element += index * dim.stride;
#pragma unroll
    for (int s = 0; s < kSides; ++s) result.side[s] += index * dim.side[s];
    return result;
  }
};

template <class View_, class Sides>
struct ViewLayout {
  using View = View_;
  static constexpr int kSides = Sides::kCount;
  static constexpr int64_t kColumns = View::kView.columns;
  using Offsets = ElementOffsets<kSides>;
  using Dim = SidedDim<kSides>;
  using RowIndex = typename Conditional<View::kWide, uint64_t, uint32_t>::type;
  template <int side>
  using Side = typename Sides::template Type<side>;

  // ---- the side operands, by their roles

  // The k-th one of this role, or -1.
  static constexpr int side_of(Role role, int k = 0) {
    for (int s = 0; s < kSides; ++s) {
      if (Sides::kRoles[s] == role && k-- == 0) return s;
    }
    return -1;
  }
  // The k-th one that expressions read.
  static constexpr int fused_side(int k) {
    for (int s = 0; s < kSides; ++s) {
      if ((Sides::kRoles[s] == Role::kArray || is_index(s)) && k-- == 0) return s;
    }
    return -1;
  }
  static constexpr bool is_index(int side) { return Sides::kRoles[side] == Role::kIndex; }
  static constexpr const SideStrides& strides_of(int side) { return Sides::kStrides[side]; }
  static constexpr int bytes_of_side(int side) { return Sides::kBytes[side]; }
  static constexpr int kMaskSide = side_of(Role::kMask);
  static constexpr bool kMasked = kMaskSide >= 0;

  // ---- rows

  // The d-th batch or reduced dimension of the view.
  static constexpr __device__ __forceinline__ Dim batch_dim(int d) {
    Dim dim{View::kView.batch.dim[d].extent, View::kView.batch.dim[d].stride, {}};
    for (int s = 0; s < kSides; ++s) dim.side[s] = Sides::kStrides[s].batch[d];
    return dim;
  }
  static constexpr __device__ __forceinline__ Dim reduced_dim(int d) {
    Dim dim{View::kView.reduced.dim[d].extent, View::kView.reduced.dim[d].stride, {}};
    for (int s = 0; s < kSides; ++s) dim.side[s] = Sides::kStrides[s].reduced[d];
    return dim;
  }
  static constexpr int kBatchDims = View::kView.batch.size, kReducedDims = View::kView.reduced.size;
  // `from`, moved along the batch, or reduced, dimensions [kBegin, kEnd) to the index-th combination of their indices,
  // the innermost varying fastest. Extents are constants, so that divisions are multiplications; the outermost one's is
  // not needed.
  template <int kEnd, int kBegin = 0, class Index>
  static __device__ __forceinline__ Offsets along_batch(const Offsets& from, Index index) {
    return along_dims<true, kEnd, kBegin>(from, index);
  }
  template <int kEnd, int kBegin = 0, class Index>
  static __device__ __forceinline__ Offsets along_reduced(const Offsets& from, Index index) {
    return along_dims<false, kEnd, kBegin>(from, index);
  }
  // The batch dimension along which the rows of a launch are numbered first, or -1: the innermost one. Another one, if
  // a large side operand is broadcast along it: rows that share a part of that operand are then read at about the same
  // time, while the L2 cache holds that part.
  static constexpr int swept_dim() {
    constexpr int64_t kCachedElements = 8 << 20;  // of the operands, in the dimensions inside of this one
    int64_t inner = View::kView.columns;
    for (int d = kBatchDims - 1; d >= 0; --d) {
      bool broadcast = false;
      for (int s = 0; s < kSides; ++s) {
        const SideStrides& strides = Sides::kStrides[s];
        bool by_rows = false, by_columns = false;
        for (int k = d + 1; k < kBatchDims; ++k) by_rows = by_rows || strides.batch[k] != 0;
        for (int k = 0; k < kReducedDims; ++k) by_columns = by_columns || strides.reduced[k] != 0;
        broadcast = broadcast || (!is_index(s) && by_rows && by_columns && strides.batch[d] == 0);
      }
      if (broadcast && inner >= kCachedElements) return d;
      inner *= d > 0 ? View::kView.batch.dim[d].extent : 1;
    }
    return -1;
  }
  // The number in the view of a launch's index-th row.
  static __device__ __forceinline__ int64_t row_of_launch(int64_t index, int64_t all_rows) {
    constexpr int kSwept = swept_dim();
    if constexpr (kSwept < 0) {
      return index;
    } else {
      RowIndex inner = 1;
#pragma unroll
      for (int d = kSwept + 1; d < kBatchDims; ++d) inner *= static_cast<RowIndex>(batch_dim(d).extent);
      const RowIndex rows = static_cast<RowIndex>(all_rows);
      const RowIndex extent = kSwept == 0 ? rows / inner : static_cast<RowIndex>(batch_dim(kSwept).extent);
      const RowIndex others = static_cast<RowIndex>(index) / extent, swept = static_cast<RowIndex>(index) % extent;
      return static_cast<int64_t>((others / inner * extent + swept) * inner + others % inner);
    }
  }
  // Where a row's first element lies.
  static __device__ __forceinline__ Offsets begin_of(int64_t row) {
    return along_batch<kBatchDims>(Offsets{}, static_cast<RowIndex>(row));
  }

 private:
  template <bool kBatch, int kEnd, int kBegin, class Index>
  static __device__ __forceinline__ Offsets along_dims(const Offsets& from, Index index) {
    if constexpr (kBegin == kEnd) {
      return from;
    } else {
      constexpr Dim dim = kBatch ? batch_dim(kEnd - 1) : reduced_dim(kEnd - 1);
      if constexpr (kBegin == kEnd - 1) {
        return from.along(dim, index);
      } else {
        const Index outer = index / static_cast<Index>(dim.extent);
        return along_dims<kBatch, kEnd - 1, kBegin>(from.along(dim, index - outer * static_cast<Index>(dim.extent)),
                                                    outer);
      }
    }
  }
};

}  // namespace jax_softmax::device
