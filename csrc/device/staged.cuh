// The schedule `staged`, for short rows that are not whole packs. A block's rows are a slab, contiguous in memory,
// which the block reads and writes in whole packs, through shared memory.
#pragma once

#include "device/barrier.cuh"
#include "device/memory.cuh"
#include "device/reduce.cuh"
#include "geometry/staged.h"

namespace jax_softmax::device {

// A lane's words of a row of 16-bit elements, each two elements: neighbouring lanes have neighbouring words. A first or
// last element that shares its word with another row is the first lane's. `begin`: the row's first element in the slab,
// whose operands are kOperand elements apart.
template <class Mem, int kColumns, int kLanes, int kPairs, int kOperand>
struct PairsOfLane {
  using Op = typename Mem::Op;
  using C = typename Mem::C;
  using T = typename Mem::In;
  static constexpr int kInputs = Mem::kInputs;
  static constexpr bool kOdd = kColumns % 2 != 0;
  T* held;
  uint32_t* words;
  int mine;  // word i is the lane's if i * kLanes < mine
  bool first, last;
  uint32_t raw[kPairs + 1][kInputs];  // [kPairs]: the first and last element

  __device__ __forceinline__ PairsOfLane(T* slab, int begin, bool exists) {
    const int lane = threadIdx.x % kLanes, shift = begin % 2;
    held = slab + begin;
    words = reinterpret_cast<uint32_t*>(held + shift) + lane;
    mine = exists ? (kColumns - shift) / 2 - lane : 0;
    first = lane == 0 && exists && shift != 0;
    last = lane == 0 && exists && (kColumns - shift) % 2 != 0;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const uint32_t pads = Pair<T>::narrow(Op::pad(k), Op::pad(k));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        raw[i][k] = pads;
        if (i * kLanes < mine) raw[i][k] = words[k * (kOperand / 2) + i * kLanes];
      }
      raw[kPairs][k] = pads;
      if (kOdd) {
        const T pad = Elements<T>::narrow(Op::pad(k));
        raw[kPairs][k] = Pair<T>::narrow(Elements<T>::widen(first ? held[k * kOperand] : pad),
                                         Elements<T>::widen(last ? held[k * kOperand + kColumns - 1] : pad));
      }
    }
  }
  __device__ __forceinline__ void widen(C (&values)[2][kInputs], int i) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) Pair<T>::widen(values[0][k], values[1][k], raw[i][k]);
  }
  // Of the first operand.
  __device__ __forceinline__ C largest() const {
    uint32_t pair = raw[kPairs][0];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pair = Pair<T>::max(pair, raw[i][0]);
    C low, high;
    Pair<T>::widen(low, high, pair);
    return Mem::M::max(low, high);
  }
  // Writes result(i) to word i, and the halves of result(kPairs) to the row's first and last element.
  template <class F>
  __device__ __forceinline__ void write(const F& result) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (i * kLanes < mine) words[i * kLanes] = result(i);
    }
    if (first || last) {
      const uint32_t edges = result(kPairs);
      auto* const half = reinterpret_cast<uint16_t*>(held);
      if (first) half[0] = static_cast<uint16_t>(edges);
      if (last) half[kColumns - 1] = static_cast<uint16_t>(edges >> 16);
    }
  }
};

// The operator on a row of 16-bit elements in shared memory, in place.
template <class Mem, int kColumns, int kLanes, int kPairs, int kOperand>
__device__ __forceinline__ void row_of_pairs(typename Mem::In* slab, int begin, bool exists) {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  const PairsOfLane<Mem, kColumns, kLanes, kPairs, kOperand> pairs(slab, begin, exists);
  C pivot = M::constant(0);
  if constexpr (Op::kHasPivot) pivot = max_over_lanes<kLanes, M>(pairs.largest());
  const Relative<M> relative(pivot);
  C terms[Op::kResultIsScaledTerm ? kPairs + 1 : 1][2];
  typename Op::Sum sum{};
  const auto add = [&](int i) {
    C values[2][Mem::kInputs];
    pairs.widen(values, i);
    const auto low = Op::term(relative, values[0]), high = Op::term(relative, values[1]);
    if constexpr (Op::kResultIsScaledTerm) terms[i][0] = low, terms[i][1] = high;
    sum += low + high;
  };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) add(i);
  if (pairs.kOdd) add(kPairs);
  const auto finished = Op::finished(StateOf<Op>{pivot, sum_over_lanes<kLanes>(sum)});
  pairs.write([&](int i) {
    if constexpr (Op::kResultIsScaledTerm) {
      return Pair<typename Mem::Out>::narrow(terms[i][0] * finished.scale, terms[i][1] * finished.scale);
    } else {
      C values[2][Mem::kInputs];
      pairs.widen(values, i);
      return Pair<typename Mem::Out>::narrow(Op::finish(finished, values[0]), Op::finish(finished, values[1]));
    }
  });
}

// Reads a lane's elements of a row from shared memory: element i of the lane is i * kLanes elements after its first
// one, and exists if that is below `mine`.
template <class Mem, int kLanes, int kOperand, int kElements, class OffsetsOf>
__device__ __forceinline__ void read_values(typename Mem::C (&values)[kElements][Mem::kInputs], const Mem& mem,
                                            const typename Mem::In* in, int mine, OffsetsOf offsets_of) {
  constexpr int kInputs = Mem::kInputs;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) values[i][k] = Mem::Op::pad(k);
    if (i * kLanes < mine) {
      typename Mem::In raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = in[k * kOperand + i * kLanes];
      if (mem.is_unmasked(offsets_of(i))) mem.value(values[i], raw, offsets_of(i));
    }
  }
}

// Writes their results there. If results are scaled terms, `values` holds the terms.
template <class Mem, int kLanes, int kElements, class OffsetsOf>
__device__ __forceinline__ void write_results(typename Mem::Out* out,
                                              const typename Mem::C (&values)[kElements][Mem::kInputs], const Mem& mem,
                                              const typename Mem::Op::Finished& finished,
                                              const typename Mem::Addend& addend, int lane, int mine,
                                              OffsetsOf offsets_of) {
  using Op = typename Mem::Op;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    typename Mem::C result;
    if constexpr (Op::kResultIsScaledTerm) {
      result = values[i][0] * finished.scale;
    } else {
      result = Op::finish(finished, values[i]);
    }
    if (i * kLanes < mine) {
      result = mem.is_unmasked(offsets_of(i)) ? result : Op::masked();
      out[i * kLanes] = mem.store_others(offsets_of(i), Mem::add_at_label(result, addend, lane + i * kLanes));
    }
  }
}

// Copy a slab between device memory, from offset `begin` on, and shared memory.
template <class Mem, int kThreads, int kOperand>
__device__ __forceinline__ void load_slab(const Mem& mem, int64_t begin, int elements, Pack* shared) {
  using In = typename Mem::In;
  constexpr int kWidth = Mem::kWidth, kInputs = Mem::kInputs;
  for (int j = threadIdx.x; j * kWidth < elements; j += kThreads) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const In* const from = mem.in(k) + begin + j * kWidth;
      Pack* const to = &shared[k * (kOperand / kWidth) + j];
      if constexpr (Mem::kPacks) {
        copy_pack(to, from);
      } else {
        *to = Mem::load(from, bits_within<In>(j * kWidth, elements));
      }
    }
  }
  wait_for_copies();
  __syncthreads();
}
template <class Mem, int kThreads>
__device__ __forceinline__ void store_slab(const Mem& mem, int64_t begin, int elements,
                                           const typename Mem::Out* results) {
  using Out = typename Mem::Out;
  constexpr int kWidth = kPerPack<Out>;
  __syncthreads();
  const Pack* const packs = reinterpret_cast<const Pack*>(results);
  for (int j = threadIdx.x; j * kWidth < elements; j += kThreads) {
    Out* const to = mem.out() + begin + j * kWidth;
    const unsigned inside = bits_within<Out>(j * kWidth, elements);
    if (Mem::kPacks && inside == kAllBits<Out>) {
      store_words(to, packs[j]);
    } else {
      store_elements(to, packs[j], inside);
    }
  }
}

// Computes the block's rows by pairs of elements.
template <class Mem, class Plan, int kOperand>
__device__ __forceinline__ void rows_of_pairs(typename Mem::In* slab, int rows) {
  constexpr int kColumns = Mem::kColumns, kThreads = Plan::kPlan.threads, kLanes = Plan::kPlan.lanes;
  constexpr int kTeams = 32 / kLanes,
                kSpread = Plan::kPlan.spread;  // teams of a warp, and how far apart their rows are
  const int team = threadIdx.x % 32 / kLanes;
  const int turns = static_cast<int>(ceil_div(rows, kTeams * kSpread)) * kSpread;  // of warps
  for (int turn = threadIdx.x / 32; turn < turns; turn += kThreads / 32) {
    const int row = (turn / kSpread * kTeams + team) * kSpread + turn % kSpread;
    row_of_pairs<Mem, kColumns, kLanes, Plan::kPlan.lane_elements / 2, kOperand>(slab, min(row, rows - 1) * kColumns,
                                                                                 row < rows);
  }
}

// Computes the block's rows element by element.
template <class Mem, class Plan, int kOperand>
__device__ __forceinline__ void rows_of_elements(const Mem& mem, const typename Mem::In* in, typename Mem::Out* out,
                                                 int64_t first_row, int rows) {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  constexpr typename Mem::Dim kInnermost = Mem::reduced_dim(0);
  constexpr int kColumns = Mem::kColumns, kThreads = Plan::kPlan.threads;
  constexpr int kLanes = Plan::kPlan.lanes, kElements = Plan::kPlan.lane_elements;
  const int lane = threadIdx.x % kLanes;
  for (int turn = 0; turn < rows; turn += kThreads / kLanes) {  // by whole warps, which reduce together
    const int row = min(turn + static_cast<int>(threadIdx.x) / kLanes, rows - 1);
    const bool active = turn + static_cast<int>(threadIdx.x) / kLanes < rows;
    const int begin = row * kColumns + lane;
    const auto first = Mem::begin_of(first_row + row);
    const auto label_element = mem.label_element(first);
    const auto addend = mem.addend(first);
    const int mine = active ? kColumns - lane : 0;
    const auto offsets_of = [&](int i) { return first.along(kInnermost, lane + i * kLanes); };
    C values[kElements][Mem::kInputs];
    read_values<Mem, kLanes, kOperand>(values, mem, in + begin, mine, offsets_of);
    C pivot = M::constant(0);
    if constexpr (Op::kHasPivot) {
      pivot = Op::pivot_candidate(values[0][0]);
#pragma unroll
      for (int i = 1; i < kElements; ++i) pivot = M::max(pivot, Op::pivot_candidate(values[i][0]));
      pivot = max_over_lanes<kLanes, M>(pivot);
    }
    const auto terms = mem.terms(pivot, first);
    typename Op::Sum sum{};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const auto term = Op::term(terms, values[i]);
      if constexpr (Op::kResultIsScaledTerm) values[i][0] = term;
      sum += term;
    }
    const StateOf<Op> state{pivot, sum_over_lanes<kLanes>(sum)};
    if (lane == 0 && active) mem.store_row(first_row + row, state, label_element);
    const auto finished = mem.finished(state, first);
    if constexpr (Op::kElementResults) {
      write_results<Mem, kLanes>(out + begin, values, mem, finished, addend, lane, mine, offsets_of);
    }
  }
}

template <class Mem, class Plan>
__device__ __forceinline__ void staged(const typename Mem::Operands& operands) {
  constexpr int kColumns = Mem::kColumns, kRows = Plan::kPlan.rows, kThreads = Plan::kPlan.threads;
  constexpr StagedGeometry kGeometry = geometry_of(Mem::View::kView, Plan::kPlan, Plan::kFootprint);
  static_assert(kIsPlannedFor<Mem, Plan>);
  constexpr int kOperand = kGeometry.elements;
  extern __shared__ __align__(128) Pack shared[];
  const Mem mem{operands};
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int64_t slab = first_row * kColumns;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), operands.rows - first_row));
  const int elements = rows * kColumns;
  load_slab<Mem, kThreads, kOperand>(mem, slab, elements, shared);

  auto* const in = reinterpret_cast<typename Mem::In*>(shared);
  auto* const out = reinterpret_cast<typename Mem::Out*>(shared + kGeometry.results_begin / kPackBytes);
  if constexpr (Plan::kPlan.pairs) {
    rows_of_pairs<Mem, Plan, kOperand>(in, rows);
  } else {
    rows_of_elements<Mem, Plan, kOperand>(mem, in, out, first_row, rows);
  }
  if constexpr (Mem::Op::kElementResults) store_slab<Mem, kThreads>(mem, slab, elements, out);
}

}  // namespace jax_softmax::device
