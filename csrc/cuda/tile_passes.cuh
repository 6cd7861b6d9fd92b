// The schedule for tiles whose rows are too long for the chip's shared memory: read twice, in pieces.
#pragma once

#include "cuda/tile.cuh"

namespace jax_softmax::cuda {

// An int that the compiler knows.
template <int n>
struct Constant {
  __device__ constexpr operator int() const { return n; }
};

// A launch sums the pieces of tiles, another puts their states together, and the last one finishes them.
template <class A>
struct TilePassArgs {
  TileArgs<A> tile;
  State<typename A::C>* states;  // by tile, piece and column
  Divisor tiles;
  bool finish;
};

// The states of a row's pieces become one, in the place of the first: a warp to a row.
template <class Op, class M>
__global__ void __launch_bounds__(kTilePassThreads)
    combine_pieces(State<typename M::Value>* states, int pieces, int columns, int64_t rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kTilePassThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  State<typename M::Value>* const of_row = states + row / columns * pieces * columns + row % columns;
  const auto state = combine_over_lanes<Op, M, 32>(combine_entries<Op, M>(
      threadIdx.x % 32, pieces, 32, [&](int piece) { return of_row[static_cast<int64_t>(piece) * columns]; }));
  if (threadIdx.x % 32 == 0) *of_row = state;
}

template <class A, bool kSeparate, Lines kLines>
__global__ void __launch_bounds__(kTilePassThreads, sizeof(typename A::C) == 8 || A::kMasked ? 2 : 3)
    tile_pass(const __grid_constant__ TilePassArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  using States = TileStates<A, kSeparate, kLines>;
  using Line = typename TilePart<A, kSeparate, kLines>::Line;
  constexpr int kWidth = A::kWidth, kInputs = A::kInputs, kStates = States::kStates;
  constexpr int kUnroll = kTilePassPacks / kInputs;
  extern __shared__ __align__(128) Pack shared[];
  const A& access = args.tile.access;
  const Tile& tile = args.tile.tile;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const unsigned pieces = tile.cluster;
  // What was read last, and may still be in the last cache, is finished first. Neighbouring tiles go side by side.
  const unsigned number = args.finish ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int piece = static_cast<int>(args.tiles.divide(number));
  const unsigned index = number - piece * args.tiles.divisor;
  const TilePart<A, kSeparate, kLines> part(args.tile, index, piece);
  State<C>* const of_tile = args.states + static_cast<int64_t>(index) * pieces * tile.columns;

  // Calls use(i, n, held) for n lines at a time, from the i-th on, at most kUnroll, while the copies of the next ones
  // are in flight; held(u, k) is the pack of the u-th of them. Each thread copies for itself, so that there is no need
  // for a barrier. n is a constant but for the last lines.
  const auto for_packs = [&](auto use) {
    if (part.lines == 0) return;
    Line ahead = part.top;
    [[maybe_unused]] Line mended = ahead;
    int copied = 0;
    const auto held_in = [&](int batch, int u, int k) {
      return shared + ((batch % kTilePassStages * kUnroll + u) * kInputs + k) * kTilePassThreads + threadIdx.x;
    };
    const auto copy = [&](int batch) {
      Pack* const to = held_in(batch, 0, 0);
      const auto held = [&](int u) { return [=](int k) { return to + (u * kInputs + k) * kTilePassThreads; }; };
      const bool full = part.readable && part.lines - copied >= kUnroll;
      if (full && args.tile.next.plain) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u, part.step(ahead)) part.template copy<true>(ahead, held(u));
        copied += kUnroll;
      } else if (full && args.tile.next.known) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u, part.step_and_carry(ahead)) {
          part.template copy<true>(ahead, held(u));
        }
        copied += kUnroll;
      } else {
#pragma unroll 1
        for (int u = 0; u < kUnroll && copied < part.lines; ++u) {
          if (part.readable) {
            part.template copy<true>(ahead, held(u));
          } else {
            part.template copy<false>(ahead, held(u));
          }
          part.advance(ahead, copied++);
        }
      }
      commit_copies();
    };
    for (int batch = 0; batch < kTilePassStages - 1; ++batch) copy(batch);
    for (int i = 0, batch = 0; i < part.lines; i += kUnroll, ++batch) {
      copy(batch + kTilePassStages - 1);
      wait_for_all_copies_but<kTilePassStages - 1>();
      Pack* const from = held_in(batch, 0, 0);
      const auto held = [from](int u, int k) { return from + (u * kInputs + k) * kTilePassThreads; };
      const int n = min(kUnroll, part.lines - i);
      if (!args.finish && part.mends()) {  // what is stored does not depend on it
        for (int u = 0; u < n; ++u) {
          part.mend(mended, [&](int k) { return held(u, k); });
          part.advance(mended, i + u);
        }
      }
      if (n == kUnroll) {
        use(i, Constant<kUnroll>(), held);
      } else {
        use(i, n, held);
      }
    }
  };

  if (!args.finish) {
    States states;
    Relative<M> relative[kStates];
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const State<C> nothing = identity<Op, M>();
      states.pivot[s] = nothing.pivot;
      states.sum[s] = nothing.sum;
      relative[s] = Relative<M>(nothing.pivot);
    }
    [[maybe_unused]] Pack largest = A::pad_pack(0);
    for_packs([&](int, auto n, auto held) {
      if constexpr (Op::kHasPivot) {
        Pack larger = largest;
#pragma unroll 4
        for (int u = 0; u < n; ++u) larger = Elements<T>::max(larger, *held(u, 0));
        bool changed = false;
#pragma unroll
        for (int w = 0; w < 4; ++w) changed |= larger.word[w] != largest.word[w];
        if (changed) {  // which seldom happens after a few lines
          largest = larger;
          C pivot[kWidth];
          Elements<T>::widen(pivot, largest);
          if (!kSeparate) pivot[0] = A::max_element(largest);
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            relative[s] = Relative<M>(pivot[s]);
            states.sum[s] *= relative[s].rescale(states.pivot[s]);
            states.pivot[s] = pivot[s];
          }
        }
      }
#pragma unroll 4
      for (int u = 0; u < n; ++u) {
        Pack raw[kInputs];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) raw[k] = *held(u, k);
        typename A::Values values;
        A::widen(values, raw);
        C terms[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) terms[e] = Op::term(relative[kSeparate ? e : 0], values[e]);
        states.add(terms);
      }
    });
    // Lanes that share rows bring their sums to one pivot.
    States::over_lanes(tile, [&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const State<C> other = {__shfl_xor_sync(kFullWarp, states.pivot[s], offset),
                                __shfl_xor_sync(kFullWarp, states.sum[s], offset)};
        const State<C> both = combine<Op, M>({states.pivot[s], states.sum[s]}, other);
        states.pivot[s] = both.pivot;
        states.sum[s] = both.sum;
      }
    });
    __syncthreads();  // all have read what they copied, which makes room
    states.combine(part, reinterpret_cast<State<C>*>(shared), [&](int column, const State<C>& state, int lane, int) {
      if (lane == 0) of_tile[piece * tile.columns + column] = state;
    });
    return;
  }

  typename Op::Row row[kStates];
  States::for_columns(part, [&](int s, int column) { row[s] = Op::row(of_tile[column]); });
  Line line = part.top;
  for_packs([&](int i, auto n, auto held) {
    const auto result_of = [&](int u) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = *held(u, k);
      return finish_separately<A>(row, raw);
    };
    if (part.storable && args.tile.next.plain) {
#pragma unroll 4
      for (int u = 0; u < n; ++u, part.step(line)) part.template store<true>(line, result_of(u));
    } else if (part.storable && args.tile.next.known) {
#pragma unroll 4
      for (int u = 0; u < n; ++u, part.step_and_carry(line)) part.template store<true>(line, result_of(u));
    } else {
#pragma unroll 1
      for (int u = 0; u < n; ++u) {
        part.template store<false>(line, result_of(u));
        part.advance(line, i + u);
      }
    }
  });
}

}  // namespace jax_softmax::cuda
