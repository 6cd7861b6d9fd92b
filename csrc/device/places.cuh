// Where rows, elements and what broadcasts to them lie: constants of a kernel, but for the outermost kept extent.
#pragma once

#include "device/types.cuh"
#include "geometry/operands.h"

namespace jax_softmax::device {

// A dimension of the view: its extent, and how far apart its neighbours lie in the operands and in each side operand.
template <int kSides>
struct SidedDim {
  int64_t extent;
  int64_t stride;
  int64_t side[kSides > 0 ? kSides : 1];
};

// Where an element lies in the operands, and in the side operands.
template <int kSides>
struct Offset {
  int64_t element;
  int64_t side[kSides > 0 ? kSides : 1];

  // `index` steps along a dimension.
  __device__ __forceinline__ Offset along(const SidedDim<kSides>& dim, int64_t index) const {
    Offset moved = *this;
    moved.element += index * dim.stride;
#pragma unroll
    for (int s = 0; s < kSides; ++s) moved.side[s] += index * dim.side[s];
    return moved;
  }
};

template <class View_, class Sides>
struct Places {
  using View = View_;
  static constexpr int kSides = Sides::kCount;
  static constexpr int64_t kColumns = View::kView.columns;
  using Place = Offset<kSides>;
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
  static constexpr const Strides& strides_of(int side) { return Sides::kStrides[side]; }
  static constexpr int bytes_of_side(int side) { return Sides::kBytes[side]; }
  static constexpr int kMaskSide = side_of(Role::kMask);
  static constexpr bool kMasked = kMaskSide >= 0;

  // ---- rows

  // The d-th kept or reduced dimension of the view.
  static constexpr __device__ __forceinline__ Dim kept_dim(int d) {
    Dim dim{View::kView.kept.dim[d].extent, View::kView.kept.dim[d].stride, {}};
    for (int s = 0; s < kSides; ++s) dim.side[s] = Sides::kStrides[s].kept[d];
    return dim;
  }
  static constexpr __device__ __forceinline__ Dim reduced_dim(int d) {
    Dim dim{View::kView.reduced.dim[d].extent, View::kView.reduced.dim[d].stride, {}};
    for (int s = 0; s < kSides; ++s) dim.side[s] = Sides::kStrides[s].reduced[d];
    return dim;
  }
  static constexpr int kKeptDims = View::kView.kept.size, kReducedDims = View::kView.reduced.size;
  // `from` moved by the index-th combination of the indices of the kept, or reduced, dimensions [kBegin, kEnd), the
  // innermost of which varies fastest. Extents are constants, so that no division is one; the outermost one's is not
  // needed.
  template <int kEnd, int kBegin = 0, class Index>
  static __device__ __forceinline__ Place along_kept(const Place& from, Index index) {
    return along_dims<true, kEnd, kBegin>(from, index);
  }
  template <int kEnd, int kBegin = 0, class Index>
  static __device__ __forceinline__ Place along_reduced(const Place& from, Index index) {
    return along_dims<false, kEnd, kBegin>(from, index);
  }
  // The kept dimension along which neighbouring rows of a launch lie, or -1: the innermost. It is another one if a
  // large array is broadcast along that: rows that share a part of the array are then read at about the same time,
  // while the last cache still holds that part.
  static constexpr int swept_dim() {
    constexpr int64_t kCachedElements = 8 << 20;  // of the operands, in a sweep over the other dimensions
    int64_t inner = View::kView.columns;
    for (int d = kKeptDims - 1; d >= 0; --d) {
      bool broadcast = false;
      for (int s = 0; s < kSides; ++s) {
        const Strides& strides = Sides::kStrides[s];
        bool by_rows = false, by_columns = false;
        for (int k = d + 1; k < kKeptDims; ++k) by_rows = by_rows || strides.kept[k] != 0;
        for (int k = 0; k < kReducedDims; ++k) by_columns = by_columns || strides.reduced[k] != 0;
        broadcast = broadcast || (!is_index(s) && by_rows && by_columns && strides.kept[d] == 0);
      }
      if (broadcast && inner >= kCachedElements) return d;
      inner *= d > 0 ? View::kView.kept.dim[d].extent : 1;
    }
    return -1;
  }
  // The number, in the view, of the index-th row of a launch that has them all.
  static __device__ __forceinline__ int64_t row_of_launch(int64_t index, int64_t all_rows) {
    constexpr int kSwept = swept_dim();
    if constexpr (kSwept < 0) {
      return index;
    } else {
      RowIndex inner = 1;
#pragma unroll
      for (int d = kSwept + 1; d < kKeptDims; ++d) inner *= static_cast<RowIndex>(kept_dim(d).extent);
      const RowIndex rows = static_cast<RowIndex>(all_rows);
      const RowIndex extent = kSwept == 0 ? rows / inner : static_cast<RowIndex>(kept_dim(kSwept).extent);
      const RowIndex others = static_cast<RowIndex>(index) / extent, swept = static_cast<RowIndex>(index) % extent;
      return static_cast<int64_t>((others / inner * extent + swept) * inner + others % inner);
    }
  }
  // Where a row's first element lies.
  static __device__ __forceinline__ Place begin_of(int64_t row) {
    return along_kept<kKeptDims>(Place{}, static_cast<RowIndex>(row));
  }

 private:
  template <bool kKept, int kEnd, int kBegin, class Index>
  static __device__ __forceinline__ Place along_dims(const Place& from, Index index) {
    if constexpr (kBegin == kEnd) {
      return from;
    } else {
      constexpr Dim dim = kKept ? kept_dim(kEnd - 1) : reduced_dim(kEnd - 1);
      if constexpr (kBegin == kEnd - 1) {
        return from.along(dim, index);
      } else {
        const Index outer = index / static_cast<Index>(dim.extent);
        return along_dims<kKept, kEnd - 1, kBegin>(from.along(dim, index - outer * static_cast<Index>(dim.extent)),
                                                   outer);
      }
    }
  }
};

}  // namespace jax_softmax::device
