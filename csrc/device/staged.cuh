// The schedule `staged`, for short rows that are not whole packs. A block's rows are a slab, contiguous in memory,
// which the block reads and writes in whole packs, through shared memory.
#pragma once

#include "device/barrier.cuh"
#include "device/memory.cuh"
#include "device/reduce.cuh"
#include "geometry/staged.h"

namespace jax_softmax::device {

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

// Computes the block's rows.
template <class Mem, class Plan, int kOperand>
__device__ __forceinline__ void compute_rows(const Mem& mem, const typename Mem::In* in, typename Mem::Out* out,
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
  compute_rows<Mem, Plan, kOperand>(mem, in, out, first_row, rows);
  if constexpr (Mem::Op::kElementResults) store_slab<Mem, kThreads>(mem, slab, elements, out);
}

}  // namespace jax_softmax::device
