// The schedule `twice`, for rows that are too long to hold: they are read twice, in pieces (geometry/twice.h). Of tiles
// of few lines, whose states would take much memory, one block has all pieces.
#pragma once

#include "device/reduce.cuh"
#include "device/row.cuh"
#include "device/tile_states.cuh"
#include "geometry/twice.h"

namespace jax_softmax::device {

// ---- launches that overlap (Launch::overlaps)

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The packs [begin, end) of a row, which a block reads.
template <class Mem, class Plan>
struct PacksOfBlock {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  using Row = RowPacks<Mem, Plan>;
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth, kThreads = Plan::kPlan.threads;
  static constexpr int kFinished = Plan::kPlan.finished;

  const Mem& mem;
  const Row& row;
  const int64_t begin, end;

  // Calls body(packs, locations, inside) for kTogether of the thread's packs at a time, whose loads are in flight
  // together. `inside` has a bit for each element of a pack, set if it is the row's.
  template <int kFirst, int kTogether, class Body>
  __device__ __forceinline__ void for_packs(Body body) const {
    for (int64_t turn = begin + threadIdx.x; turn < end; turn += static_cast<int64_t>(kTogether) * kThreads) {
      Pack raw[kTogether][kInputs];
      typename Row::PackLocation location[kTogether];
      unsigned inside[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int64_t j = turn + u * kThreads;
        location[u] = row.locate(static_cast<int>(min(j, Row::kPacks - 1)));
        inside[u] = j < end ? location[u].inside() : 0;
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
          raw[u][k] = Mem::pad_pack(k);
          if (k >= kFirst && inside[u]) raw[u][k] = Mem::load(mem.in(k) + location[u].offsets.element, inside[u]);
        }
      }
      body(raw, location, inside);
    }
  }

  // The state of these packs, in all threads of the block.
  __device__ __forceinline__ StateOf<Op> state() const {
    constexpr int kTogether = (Mem::kIdentityLoad ? 8 : 4) / (kInputs - Mem::kFirstSummed);  // that registers hold
    StateOf<Op> state = identity<Op, M>();
    for_packs<Mem::kFirstSummed, kTogether>([&](auto& raw, const auto& location, const auto& inside) {
      unsigned unmasked[kTogether];
      typename Mem::Cached cached[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        unmasked[u] = mem.unmasked(location[u], inside[u]);
        if (unmasked[u] != Mem::kAll && inside[u]) Mem::put_pads(raw[u], unmasked[u]);
        mem.cache(cached[u], raw[u], location[u], unmasked[u]);
      }
      if constexpr (Op::kHasPivot) {
        MaxOfPacks<Mem> largest;
#pragma unroll
        for (int u = 0; u < kTogether; ++u) largest.add(mem, cached[u], location[u], unmasked[u]);
        const C pivot = M::max(state.pivot, largest.get());
        state.sum = rescaled(state.sum, Relative<M>(pivot), state.pivot);
        state.pivot = pivot;
      }
      const auto terms = mem.terms(state.pivot, row.begin);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        typename Mem::Values values;
        mem.values(values, cached[u], location[u], unmasked[u]);
        typename Op::Sum part{};
#pragma unroll
        for (int i = 0; i < kWidth; ++i) part += Op::term(terms, values[i]);
        state.sum += part;
      }
    });
    return Team<Op, kThreads, kThreads>::combine(combine_over_lanes<Op, 32>(state));
  }

  __device__ __forceinline__ void finish(const StateOf<Op>& state) const {
    const auto finished = mem.finished(state, row.begin);
    const auto addend = mem.addend(row.begin);
    for_packs<0, kFinished>([&](auto& raw, const auto& location, const auto& inside) {
#pragma unroll
      for (int u = 0; u < kFinished; ++u) {
        if (!inside[u]) continue;
        const unsigned unmasked = mem.unmasked(location[u], inside[u]);
        typename Mem::Values values;
        mem.values(values, raw[u], location[u], unmasked);
        C result[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result[i] = Op::finish(finished, values[i]);
        const bool counts = Mem::mask_and_add(result, unmasked, addend, location[u].column());
        mem.store(mem.out() + location[u].offsets.element, location[u].offsets.element, result, counts, location[u],
                  inside[u]);
      }
    });
  }
};

template <class Op, class OperandsOfKernel>
__device__ __forceinline__ StateOf<Op>* states_of(const OperandsOfKernel& operands) {
  return reinterpret_cast<StateOf<Op>*>(operands.scratch);
}

// ---- the first and the last launch, of rows

template <class Mem, class Plan>
__device__ __forceinline__ void sum_pieces(const typename Mem::Operands& operands) {
  constexpr Twice kPlan = Plan::kPlan;
  const Mem mem{operands};
  const int64_t index = blockIdx.x / kPlan.pieces, piece = blockIdx.x - index * kPlan.pieces;
  using Row = RowPacks<Mem, Plan>;
  const Row row(index);
  const int64_t begin = piece * kPlan.share;
  const PacksOfBlock<Mem, Plan> packs{mem, row, begin, min(begin + kPlan.share, Row::kPacks)};
  const auto state = packs.state();
  if (threadIdx.x == 0) states_of<typename Mem::Op>(operands)[blockIdx.x] = state;
}

template <class Mem, class Plan>
__device__ __forceinline__ void finish_pieces(const typename Mem::Operands& operands) {
  using Row = RowPacks<Mem, Plan>;
  constexpr int64_t kShare = Plan::kPlan.packs_of_block(), kParts = Plan::kPlan.blocks_of_row(Row::kRunsOfRow);
  wait_for_previous_kernel();
  const Mem mem{operands};
  const int64_t index = blockIdx.x / kParts, begin = (blockIdx.x - index * kParts) * kShare;
  const Row row(index);
  const PacksOfBlock<Mem, Plan> packs{mem, row, begin, min(begin + kShare, Row::kPacks)};
  packs.finish(states_of<typename Mem::Op>(operands)[index * Plan::kPlan.pieces]);
}

// ---- of tiles

// Tile plans: of the pieces that are summed, and of the smaller ones that results are computed by.
template <class Plan_>
struct Summed : Plan_ {
  static constexpr Tile kPlan = Plan_::kPlan.tile;
};
template <class Plan_>
struct Smaller : Plan_ {
  static constexpr Tile kPlan = Plan_::kPlan.smaller();
};

template <class Mem, class Plan>
__device__ __forceinline__ void sum_tile_pieces(const typename Mem::Operands& operands) {
  using Part = TilePart<Mem, Summed<Plan>>;
  extern __shared__ __align__(128) Pack shared[];
  const Mem mem{operands};
  const int64_t index = blockIdx.x / Part::kParts;
  TileStates<Mem, Summed<Plan>> part(mem, shared, index, static_cast<int>(blockIdx.x - index * Part::kParts));
  part.sum_read();
  StateOf<typename Mem::Op>* const to =
      states_of<typename Mem::Op>(operands) + static_cast<int64_t>(blockIdx.x) * Part::kRows;
  part.combine([&](int row, const StateOf<typename Mem::Op>& state) { to[row] = state; });
}

template <class Mem, class Plan>
__device__ __forceinline__ void finish_tile_pieces(const typename Mem::Operands& operands) {
  using Part = TilePart<Mem, Smaller<Plan>>;
  extern __shared__ __align__(128) Pack shared[];
  const Mem mem{operands};
  const int64_t index = blockIdx.x / Part::kParts;
  wait_for_previous_kernel();
  const TileStates<Mem, Smaller<Plan>> part(mem, shared, index, static_cast<int>(blockIdx.x - index * Part::kParts));
  const StateOf<typename Mem::Op>* const whole =
      states_of<typename Mem::Op>(operands) + index * TilePart<Mem, Summed<Plan>>::kParts * Part::kRows;
  for (int i = threadIdx.x; i < Part::kRows; i += Part::kThreads) part.whole(i) = whole[i];
  __syncthreads();
  part.finish();
}

// One block sums all pieces of a tile, and writes its results.
template <class Mem, class Plan>
__device__ __forceinline__ void whole_tiles(const typename Mem::Operands& operands) {
  using Part = TilePart<Mem, Summed<Plan>>;
  using Op = typename Mem::Op;
  extern __shared__ __align__(128) Pack shared[];
  const Mem mem{operands};
  for (int piece = 0; piece < Part::kParts; ++piece) {
    TileStates<Mem, Summed<Plan>> part(mem, shared, blockIdx.x, piece);
    part.sum_read();
    part.combine([&](int row, StateOf<Op> state) {
      if (piece > 0) state = combine<Op, typename Mem::M>(part.whole(row), state);
      part.whole(row) = state;
    });
    __syncthreads();
  }
  TileStates<Mem, Summed<Plan>>(mem, shared, blockIdx.x, 0).store_rows();
  if constexpr (!Op::kElementResults) return;
  using Finished = TileStates<Mem, Smaller<Plan>>;
  for (int piece = 0; piece < Finished::kParts; ++piece) {
    Finished(mem, shared, blockIdx.x, piece).finish();
  }
}

// ---- the launch between them: combines the states of each row's pieces into the state of the first piece

template <class Mem, class Plan>
__device__ __forceinline__ void combine_pieces(const typename Mem::Operands& operands) {
  using Op = typename Mem::Op;
  constexpr Combining kCombining = combining_of(Mem::View::kView, Plan::kPlan, Plan::kFootprint);
  constexpr int kPieces = kCombining.pieces, kRows = kCombining.rows;
  const Mem mem{operands};
  const auto store = [&](int64_t row, const StateOf<Op>& state) {
    mem.store_row(row, state, mem.label_element(Mem::begin_of(row)));
  };
  // Some rows of a tile are another tile's, or beyond the line's end.
  const auto store_row = [&](int64_t tile, int row, const StateOf<Op>& state) {
    if constexpr (Op::kRowResults > 0 && kRows > 1) {
      using Part = TilePart<Mem, Summed<Plan>>;
      const int64_t element = tile % Part::kTilesOfLine * Part::kElements + row;
      if (row >= Part::kElements || element >= Part::kInner) return;
      store(tile / Part::kTilesOfLine * Part::kInner + element, state);
    } else {
      store(tile, state);
    }
  };
  let_next_kernel_start();
  wait_for_previous_kernel();
  // A row is combined by a warp or, of tiles, by one lane of each warp of the block.
  constexpr int kWarps = Combining::kWarps, kLanes = kCombining.lanes_of_row();
  __shared__ StateOf<Op> part[kRows == 1 ? 1 : kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index =
      kRows == 1 ? static_cast<int64_t>(blockIdx.x) * kWarps + warp : static_cast<int64_t>(blockIdx.x) * 32 + lane;
  const int64_t tile = index / kRows;
  const bool exists = index < operands.rows;
  StateOf<Op>* const first = states_of<Op>(operands) + tile * kPieces * kRows + index % kRows;
  auto state = combine_all<Op>(kRows == 1 ? lane : warp, exists ? kPieces : 0, kLanes,
                               [&](int piece) { return first[static_cast<int64_t>(piece) * kRows]; });
  if constexpr (kRows == 1) {
    state = combine_over_lanes<Op, 32>(state);
    if (lane == 0 && exists) {
      *first = state;
      store_row(tile, 0, state);
    }
  } else {
    part[warp][lane] = state;
    __syncthreads();
    if (warp == 0 && exists) {
      for (int w = 1; w < kWarps; ++w) state = combine<Op, typename Mem::M>(state, part[w][lane]);
      *first = state;
      store_row(tile, static_cast<int>(index % kRows), state);
    }
  }
}

}  // namespace jax_softmax::device
