// Where the packs that cover a row lie (geometry/rows.h). A pack's elements outside of its run do not count.
#pragma once

#include "device/memory.cuh"
#include "geometry/rows.h"

namespace jax_softmax::device {

template <class Mem, class Plan>
struct RowPacks {
  using Offsets = typename Mem::Offsets;
  static_assert(kIsPlannedFor<Mem, Plan>);
  static constexpr int kWidth = Mem::kWidth;
  static constexpr typename Mem::Dim kInnermost = Mem::reduced_dim(Mem::kReducedDims - 1);  // a run lies along it
  static constexpr Runs kRunsOfRow = runs_of(Mem::View::kView, Plan::kPlan.boundary, Plan::kFootprint);
  static constexpr int64_t kRunElements = kRunsOfRow.elements, kRuns = kRunsOfRow.runs;
  static constexpr int kBoundary = kRunsOfRow.boundary;  // in elements
  static constexpr int64_t kRunPacks = kRunsOfRow.packs_of_run, kPacks = kRunsOfRow.packs;
  static constexpr bool kExact = kRunsOfRow.exact;
  using Index = typename Conditional<(kRunElements < (1LL << 31) - 4096), int, int64_t>::type;

  Offsets begin;

  explicit __device__ __forceinline__ RowPacks(int64_t index) : begin(Mem::begin_of(index)) {}

  // See sides.cuh. A side operand with the strides of the operands is aligned where they are.
  static constexpr Reading reading(int side) {
    const SideStrides& strides = Mem::strides_of(side);
    const int last = Mem::kReducedDims - 1;
    if (strides.reduced[last] == 0) return Reading::kOne;
    if (!Mem::kPacks || strides.reduced[last] != 1 || Mem::is_index(side)) return Reading::kElements;
    bool whole = kExact, same = Mem::bytes_of_side(side) <= static_cast<int>(sizeof(typename Mem::In));
    for (int d = 0; d < Mem::kBatchDims; ++d) {
      whole = whole && strides.batch[d] % kWidth == 0;
      same = same && strides.batch[d] == Mem::batch_dim(d).stride;
    }
    for (int d = 0; d < last; ++d) {
      whole = whole && strides.reduced[d] % kWidth == 0;
      same = same && strides.reduced[d] == Mem::reduced_dim(d).stride;
    }
    return whole || same ? Reading::kPack : Reading::kElements;
  }

  // `offsets` are those of the pack's first element, `first` is that element's number in the run: negative, or beyond
  // the run's end, if the pack begins outside of it.
  struct PackLocation {
    Offsets offsets;
    Index first;
    int run;
    static constexpr Reading reading(int side) { return RowPacks::reading(side); }
    __device__ __forceinline__ Offsets offsets_of(int e) const { return offsets.along(kInnermost, e); }
    // The number of its first element in the row: an int, as labels are.
    __device__ __forceinline__ int column() const { return static_cast<int>(run * kRunElements + first); }
    // Whether all of its elements are in the run; whether any are; which ones are, as bits.
    __device__ __forceinline__ bool whole() const { return kExact || (first >= 0 && first <= kRunElements - kWidth); }
    __device__ __forceinline__ bool any() const { return kExact || (first > -kWidth && first < kRunElements); }
    __device__ __forceinline__ unsigned inside() const {
      return whole() ? Mem::kAll : bits_within<typename Mem::In>(first, static_cast<Index>(kRunElements));
    }
  };
  // The row's j-th pack.
  __device__ __forceinline__ PackLocation locate(int j) const {
    const int run = kRuns == 1 ? 0 : static_cast<unsigned>(j) / static_cast<unsigned>(kRunPacks);
    const Offsets run_begin = begin_of_run(run);
    const Index first = static_cast<Index>(j - run * static_cast<int>(kRunPacks)) * kWidth - shift_of(run_begin);
    return {run_begin.along(kInnermost, first), first, run};
  }
  // Which pack has the row's element of this number.
  __device__ __forceinline__ int pack_of(int column) const {
    const int run = kRuns == 1 ? 0 : column / static_cast<int>(kRunElements), first = column - run * kRunElements;
    const Offsets run_begin = begin_of_run(run);
    return run * static_cast<int>(kRunPacks) + (first + shift_of(run_begin)) / kWidth;
  }
  __device__ __forceinline__ Offsets begin_of_run(int run) const {
    return kRuns == 1 ? begin : Mem::template along_reduced<Mem::kReducedDims - 1>(begin, static_cast<unsigned>(run));
  }
  // How many elements a run begins after the boundary at which its first pack begins.
  static __device__ __forceinline__ int shift_of(const Offsets& run_begin) {
    return static_cast<int>(run_begin.element) & (kBoundary - 1);
  }
};

// The same pointer, which the compiler does not know: it keeps the pointer in a register, and does not compute the
// address for each access.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  asm("" : "+l"(p));
  return p;
}

// Pointers to a thread's packs, which are kStep packs apart: in a contiguous row they differ by constants.
template <class Row, class T, int kStep>
struct PackPointers {
  T* base;
  __device__ __forceinline__ PackPointers(T* operand, const Row& row, int first_pack)
      : base(Row::kRuns == 1 ? opaque(operand + row.locate(first_pack).offsets.element) : operand) {}
  __device__ __forceinline__ T* operator()(int p, const typename Row::PackLocation& location) const {
    return Row::kRuns == 1 ? base + static_cast<int64_t>(p) * kStep * Row::kWidth : base + location.offsets.element;
  }
};

// The pivot of cached packs: the maximum of their elements, of packs as they are in memory where these can be compared.
template <class Mem>
struct MaxOfPacks {
  using C = typename Mem::C;
  Pack raw = Mem::pad_pack(0);
  C value = -Mem::M::kInfinity;

  template <class Reader>
  __device__ __forceinline__ void add(const Mem& mem, const typename Mem::Cached& cached, const Reader& reader,
                                      unsigned bits) {
    if constexpr (Mem::kIdentityLoad) {
      raw = Mem::larger(raw, cached.raw[0]);
    } else {
      typename Mem::Values v;
      mem.values(v, cached, reader, bits);
#pragma unroll
      for (int i = 0; i < Mem::kWidth; ++i) value = Mem::M::max(value, Mem::Op::pivot_candidate(v[i][0]));
    }
  }
  __device__ __forceinline__ C get() const {
    if constexpr (Mem::kIdentityLoad) {
      C v[Mem::kWidth];
      Elements<typename Mem::In>::widen(v, raw);
      C m = v[0];
#pragma unroll
      for (int i = 1; i < Mem::kWidth; ++i) m = Mem::M::max(m, v[i]);
      return m;
    } else {
      return value;
    }
  }
};

}  // namespace jax_softmax::device
