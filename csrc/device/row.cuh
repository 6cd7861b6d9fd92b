// Where the packs of a row lie, which geometry/rows.h cuts it into. A pack's elements beyond its run do not count.
#pragma once

#include "device/memory.cuh"
#include "device/planned.cuh"
#include "geometry/rows.h"

namespace jax_softmax::device {

template <class Mem, class Plan>
struct Row {
  using Place = typename Mem::Place;
  static_assert(kIsPlannedFor<Mem, Plan>);
  static constexpr int kWidth = Mem::kWidth;
  static constexpr typename Mem::Dim kAlong =
      Mem::reduced_dim(Mem::kReducedDims - 1);  // the dimension that neighbours of a run are along
  static constexpr Runs kOfRow = runs_of(Mem::View::kView, Plan::kPlan.boundary, Plan::kFootprint);
  static constexpr int64_t kRun = kOfRow.elements, kRuns = kOfRow.runs;
  static constexpr int kBoundary = kOfRow.boundary;
  static constexpr int64_t kRunPacks = kOfRow.packs_of_run, kPacks = kOfRow.packs;
  static constexpr bool kExact = kOfRow.exact;
  using Index = typename Conditional<(kRun < (1LL << 31) - 4096), int, int64_t>::type;

  Place begin;

  explicit __device__ __forceinline__ Row(int64_t index) : begin(Mem::begin_of(index)) {}

  // How the values of a side operand along a pack are read (see sides.cuh). A pack of one that lies as the operands do
  // begins with a whole one wherever theirs does.
  static constexpr Reading reading(int side) {
    const Strides& strides = Mem::strides_of(side);
    const int last = Mem::kReducedDims - 1;
    if (strides.reduced[last] == 0) return Reading::kOne;
    if (!Mem::kPacks || strides.reduced[last] != 1 || Mem::is_index(side)) return Reading::kElements;
    bool whole = kExact, same = Mem::bytes_of_side(side) <= static_cast<int>(sizeof(typename Mem::In));
    for (int d = 0; d < Mem::kKeptDims; ++d) {
      whole = whole && strides.kept[d] % kWidth == 0;
      same = same && strides.kept[d] == Mem::kept_dim(d).stride;
    }
    for (int d = 0; d < last; ++d) {
      whole = whole && strides.reduced[d] % kWidth == 0;
      same = same && strides.reduced[d] == Mem::reduced_dim(d).stride;
    }
    return whole || same ? Reading::kPack : Reading::kElements;
  }

  // A pack: where its first element lies, and which element of the run that is, negative or beyond the end where the
  // pack begins outside of the run.
  struct At {
    Place place;
    Index first;
    int run;
    static constexpr Reading reading(int side) { return Row::reading(side); }
    __device__ __forceinline__ Place place_of(int e) const { return place.along(kAlong, e); }
    // Of its first element, as an int, which counts the columns that a label may name.
    __device__ __forceinline__ int column() const { return static_cast<int>(run * kRun + first); }
    // Whether all of its elements are the run's, or any; and which.
    __device__ __forceinline__ bool whole() const { return kExact || (first >= 0 && first <= kRun - kWidth); }
    __device__ __forceinline__ bool any() const { return kExact || (first > -kWidth && first < kRun); }
    __device__ __forceinline__ unsigned inside() const {
      return whole() ? Mem::kAll : bits_within<typename Mem::In>(first, static_cast<Index>(kRun));
    }
  };
  __device__ __forceinline__ At at(int j) const {
    const int run = kRuns == 1 ? 0 : static_cast<unsigned>(j) / static_cast<unsigned>(kRunPacks);
    const Place run_begin =
        kRuns == 1 ? begin : Mem::template along_reduced<Mem::kReducedDims - 1>(begin, static_cast<unsigned>(run));
    const Index first = static_cast<Index>(j - run * static_cast<int>(kRunPacks)) * kWidth - shift_of(run_begin);
    return {run_begin.along(kAlong, first), first, run};
  }
  // How far a run begins beyond the boundary that its packs are counted from.
  static __device__ __forceinline__ int shift_of(const Place& run_begin) {
    return static_cast<int>(run_begin.element) & (kBoundary - 1);
  }
};

// The same pointer, hidden from the compiler, which would rather compute it anew for each access than keep it.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  asm("" : "+l"(p));
  return p;
}

// Where a thread's packs lie that are kStep packs apart: addresses that differ by constants, if the row is contiguous.
template <class R, class T, int kStep>
struct Pointer {
  T* base;
  __device__ __forceinline__ Pointer(T* operand, const R& row, int first_pack)
      : base(R::kRuns == 1 ? opaque(operand + row.at(first_pack).place.element) : operand) {}
  __device__ __forceinline__ T* operator()(int p, const typename R::At& at) const {
    return R::kRuns == 1 ? base + static_cast<int64_t>(p) * kStep * R::kWidth : base + at.place.element;
  }
};

}  // namespace jax_softmax::device
