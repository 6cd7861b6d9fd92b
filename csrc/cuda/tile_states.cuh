// The states of a tile's rows: a thread's, and those of all threads that share a row. See cuda/tile.cuh.
#pragma once

#include "cuda/exchange.cuh"
#include "cuda/tile_part.cuh"

namespace jax_softmax::cuda {

// The state of `team` neighbouring lanes, a power of 2.
template <class Op, class M>
__device__ __forceinline__ State<typename M::Value> combine_over_team(State<typename M::Value> state, int team) {
  if constexpr (Op::kHasPivot) {
    auto pivot = state.pivot;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset < team) pivot = M::max(pivot, __shfl_xor_sync(kFullWarp, pivot, offset));
    }
    state.sum *= Relative<M>(pivot).rescale(state.pivot);
    state.pivot = pivot;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < team) state.sum += __shfl_xor_sync(kFullWarp, state.sum, offset);
  }
  return state;
}

// The states that a thread has after it has gone down its lines, and what becomes of them: together with those of the
// other threads that share rows with it, the state of each of the tile's rows, here called columns.
template <class A, bool kSeparate, Lines kLines>
struct TileStates {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  static constexpr int kWidth = A::kWidth, kInputs = A::kInputs;
  static constexpr int kWidthBits = kWidth == 8 ? 3 : kWidth == 4 ? 2 : 1;
  static constexpr int kStates = kSeparate ? kWidth : 1;
  static constexpr bool kWhole = kLines == Lines::kSpanning;

  C pivot[kStates];
  C sum[kStates];

  // Over lanes that share rows: combine(how far apart they are).
  template <class Combine>
  static __device__ __forceinline__ void over_lanes(const Tile& tile, Combine combine) {
    if constexpr (kSeparate) {
      if constexpr (kLines != Lines::kRuns) {
        if (!tile.shuffled) return;
        for (int offset = 16; offset >= tile.packs; offset /= 2) combine(offset);
      }
    } else {
      for (int offset = tile.shuffled / 2; offset > 0; offset /= 2) combine(offset);
    }
  }
  __device__ __forceinline__ void set_pivot(const Tile& tile, Pack largest) {
    if constexpr (!Op::kHasPivot) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) pivot[s] = M::constant(0);
    } else if constexpr (kSeparate) {
      over_lanes(tile, [&](int offset) {
        Pack other;
#pragma unroll
        for (int w = 0; w < 4; ++w) other.word[w] = __shfl_xor_sync(kFullWarp, largest.word[w], offset);
        largest = Elements<T>::max(largest, other);
      });
      Elements<T>::widen(pivot, largest);
    } else {
      pivot[0] = A::max_element(largest);
      over_lanes(tile, [&](int offset) { pivot[0] = M::max(pivot[0], __shfl_xor_sync(kFullWarp, pivot[0], offset)); });
    }
  }
  __device__ __forceinline__ void add(const C (&terms)[kWidth]) {
    if constexpr (kSeparate) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += terms[e];
    } else {
      C all = terms[0];
#pragma unroll
      for (int e = 1; e < kWidth; ++e) all += terms[e];
      sum[0] += all;
    }
  }
  __device__ __forceinline__ void add_lanes(const Tile& tile) {
    over_lanes(tile, [&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum[s] += __shfl_xor_sync(kFullWarp, sum[s], offset);
    });
  }

  // Where what belongs to a position, or a column, is in shared memory: a place is left free for each pack, so that
  // neighbouring lanes, each of which has a pack of them, do not get into each other's way.
  static __device__ __forceinline__ int slot_of(int position) { return position + (position >> kWidthBits); }
  // Calls use(s, slot) for those of a part of a segment that the thread has states of.
  template <class Part, class Use>
  static __device__ __forceinline__ void for_slots(const Part& part, Use use) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kWhole) {
        use(s, part.place * (kWidth + 1) + s);
      } else {
        const int position = part.first + s;
        if (static_cast<unsigned>(position) < static_cast<unsigned>(part.args.tile.positions))
          use(s, slot_of(position));
      }
    }
  }

  // Calls publish(column, state, lane, lanes) for each of the tile's columns in as many lanes of a warp, by way of
  // `entries`.
  template <class Part, class Publish>
  __device__ __forceinline__ void combine(const Part& part, State<C>* entries, Publish publish) const {
    const TileArgs<A>& args = part.args;
    const Tile& tile = args.tile;
    const int in_tile = part.segment * tile.unit + part.place;
    if constexpr (kSeparate) {
      const bool shuffled = kLines != Lines::kRuns && tile.shuffled;
      const bool writes = shuffled ? threadIdx.x % 32 < tile.packs : part.group < tile.groups;
      State<C>* const to = entries + (shuffled ? threadIdx.x / 32 : part.group) * tile.entries;
      if (writes) {
        // Positions count from where the segment, or the tile's part of it, begins.
        if constexpr (kLines == Lines::kRuns) {
          const int turn = tile.unit * kWidth;  // of whole columns
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            const int position = part.first + s;
            to[slot_of(part.segment * turn + position + (position < 0 ? turn : 0))] = {pivot[s], sum[s]};
          }
        } else {
          for_slots(part, [&](int s, int slot) { to[slot] = {pivot[s], sum[s]}; });
        }
      }
    } else if (part.group < tile.groups && in_tile % (1 << args.shuffled_shift) == 0) {
      entries[part.group * tile.entries + (in_tile >> args.shuffled_shift)] = {pivot[0], sum[0]};
    }
    __syncthreads();
    // A team of lanes adds up each column; warps without one have nothing to do.
    const int of_column = args.of_column.divisor, parts = of_column * tile.entry_rows, team = 1 << args.team_shift;
    const int lane = threadIdx.x % team, apart = kLines == Lines::kRuns ? static_cast<int>(tile.inner) : 1;
    for (int at = threadIdx.x; at - static_cast<int>(threadIdx.x % 32) < tile.columns * team; at += blockDim.x) {
      const int column = at >> args.team_shift, end = column < tile.columns ? parts : 0;
      State<C> state;
      if (of_column == 1) {
        const State<C>* const of_position = entries + (kSeparate ? slot_of(column) : column);
        state = combine_entries<Op, M>(lane, end, team, [&](int row) { return of_position[row * tile.entries]; });
      } else {
        const int group = kLines == Lines::kRuns ? static_cast<int>(tile.group) : 1;
        int from = column * of_column;  // the first position
        if constexpr (kLines == Lines::kRuns) {
          const int of_segment = kSeparate ? tile.unit * kWidth : of_column;
          from = column * group + static_cast<int>(args.inner.divide(column * group)) * (of_segment - apart);
        }
        // Of rows of single elements in runs, a column has 1, 2, 4 or 8 positions. A lane's parts are all at one of
        // them, if there are lanes enough.
        constexpr bool kSingle = kSeparate && kLines == Lines::kRuns;
        const auto slot = [&](int position) { return kSeparate ? slot_of(position) : position; };
        if (kSingle && group == 1 && team >= of_column) {
          const int row_of_lane = lane >> args.of_column_shift;
          const State<C>* const of_position =
              entries + slot(from + (lane - (row_of_lane << args.of_column_shift)) * apart);
          state = combine_entries<Op, M>(row_of_lane, end >> args.of_column_shift, team >> args.of_column_shift,
                                         [&](int row) { return of_position[row * tile.entries]; });
        } else {
          state = combine_entries<Op, M>(lane, end, team, [&](int i) {
            const int row = args.of_column.divide(i), part = i - row * of_column;
            const int turn = kSingle ? args.group.divide(part) : part;
            return entries[row * tile.entries + slot(from + turn * apart + (kSingle ? part - turn * group : 0))];
          });
        }
      }
      state = combine_over_team<Op, M>(state, team);
      if (column < tile.columns) publish(column, state, lane, team);
    }
  }

  // Calls use(s, column) for the column that each of the thread's states belongs to.
  template <class Part, class Use>
  static __device__ __forceinline__ void for_columns(const Part& part, Use use) {
    const Tile& tile = part.args.tile;
    if constexpr (kLines == Lines::kRuns) {
      const int inner = static_cast<int>(tile.inner), rows = part.args.group.divide(inner);  // of a segment
      const int ahead = part.first + inner * kWidth;                                         // not negative
      int in_segment = kSeparate ? ahead - static_cast<int>(part.args.inner.divide(ahead)) * inner : 0;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        use(s, min(part.segment, tile.segments - 1) * rows + static_cast<int>(part.args.group.divide(in_segment)));
        if (++in_segment == inner) in_segment = 0;
      }
    } else {
      const int first =
          kSeparate ? (kWhole ? part.place * kWidth : part.first) : part.place >> part.args.shuffled_shift;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const int position = kWhole ? first + s : min(max(first + s, 0), tile.positions - 1);
        use(s, part.args.of_column.divide(position));
      }
    }
  }
};

}  // namespace jax_softmax::cuda
