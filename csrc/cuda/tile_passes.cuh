// The schedule for tiles whose rows are too long for the chip's shared memory, or narrow: read twice, in pieces. Lines
// of several dimensions that begin anywhere in a pack come in sets that begin alike, which no piece crosses.
#pragma once

#include "cuda/passes.cuh"
#include "cuda/tile.cuh"

namespace jax_softmax::cuda {

// An int that the compiler knows.
template <int n>
struct Constant {
  static constexpr int value = n;
  __device__ constexpr operator int() const { return n; }
};

// How far the largest element may be beyond the pivot that terms are taken relative to, but for what becomes of their
// sum in the type of the elements: 8 more at the most, for numbers that are themselves so far apart.
inline constexpr int kTilePassLag = 8;

// A launch sums the pieces of tiles, another puts their states together, and the last one finishes them.
template <class A>
struct TilePassArgs {
  TileArgs<A> tile;
  State<typename A::C>* states;  // by tile, piece and column
  int pieces;                    // of a tile, that are summed; those that are finished are smaller
  Divisor tiles;
  Strided sets;
  Divisor set_pieces;  // of this launch
  bool finish;
};

template <class A, bool kSeparate, Lines kLines>
__global__ void __launch_bounds__(kTilePassThreads, sizeof(typename A::C) == 8 || A::kMasked ? 2 : 3)
    tile_pass(const __grid_constant__ TilePassArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  using States = TileStates<A, kSeparate, kLines>;
  using Part = TilePart<A, kSeparate, kLines, false>;
  using Line = typename Part::Line;
  constexpr int kWidth = A::kWidth, kInputs = A::kInputs, kStates = States::kStates;
  extern __shared__ __align__(128) Pack shared[];
  const A& access = args.tile.access;
  const Tile& tile = args.tile.tile;
  wait_for_previous_kernel();
  let_next_kernel_start();
  // What was read last, and may still be in the last cache, is finished first. Neighbouring tiles go side by side.
  const unsigned number = args.finish ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int piece = static_cast<int>(args.tiles.divide(number));
  const unsigned index = number - piece * args.tiles.divisor;
  unsigned ignored;
  const int set = args.set_pieces.divide(piece), piece_of_set = piece - set * args.set_pieces.divisor;
  const int lines = tile.all_lines - (set < tile.full_sets ? 0 : args.tile.lines.innermost());
  const Part part(args.tile, index, piece_of_set, lines, nullptr, args.sets.at(set, &ignored));
  State<C>* const of_tile = args.states + static_cast<int64_t>(index) * args.pieces * tile.columns;

  // Calls use(i, n, held) for n lines at a time, from the i-th on, at most so many as a stage has room for of the
  // operands from `first` on, while the copies of the next ones are in flight; held(u, k) is the pack of the u-th of
  // them. Each thread copies for itself, so that there is no need for a barrier. n is a constant but for the last
  // lines.
  const auto for_packs = [&](auto first, auto use) {
    constexpr int kFirst = decltype(first)::value, kOperands = kInputs - kFirst, kUnroll = kTilePassPacks / kOperands;
    if (part.lines == 0) return;
    Line ahead = part.top;
    [[maybe_unused]] Line mended = ahead;
    int copied = 0;
    const auto stage = [&](int batch) {
      return shared + batch % kTilePassStages * kTilePassPacks * kTilePassThreads + threadIdx.x;
    };
    const auto slot = [](int u, int k) { return (u * kOperands + k - kFirst) * kTilePassThreads; };
    const auto copy = [&](int batch) {
      Pack* const to = stage(batch);
      const auto held = [&](int u) { return [=](int k) { return to + slot(u, k); }; };
      const bool full = part.readable && part.lines - copied >= kUnroll;
      if (full && args.tile.next.plain) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u, part.step(ahead)) part.template copy<true, kFirst>(ahead, held(u));
        copied += kUnroll;
      } else if (full && args.tile.next.known) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u, part.step_and_carry(ahead)) {
          part.template copy<true, kFirst>(ahead, held(u));
        }
        copied += kUnroll;
      } else {
#pragma unroll 1
        for (int u = 0; u < kUnroll && copied < part.lines; ++u) {
          if (part.readable) {
            part.template copy<true, kFirst>(ahead, held(u));
          } else {
            part.template copy<false, kFirst>(ahead, held(u));
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
      Pack* const from = stage(batch);
      const auto held = [from, slot](int u, int k) { return from + slot(u, k); };
      const int n = min(kUnroll, part.lines - i);
      if (!args.finish && part.mends()) {  // what is stored does not depend on it
        for (int u = 0; u < n; ++u) {
          part.template mend<kFirst>(mended, [&](int k) { return held(u, k); });
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
    // The largest elements yet, and how large they may be before a pivot follows them: it lags behind by so little that
    // nothing overflows, since sums would otherwise be rescaled for some position or other of a warp all the time.
    [[maybe_unused]] Pack largest = A::pad_pack(0), bound = largest;
    const auto pivots_of = [](C(&pivot)[kWidth], const Pack& pack) {
      Elements<T>::widen(pivot, pack);
      if (!kSeparate) pivot[0] = A::max_element(pack);
    };
    for_packs(Constant<Op::kFirstSummed>(), [&](int, auto n, auto held) {
      if constexpr (Op::kHasPivot) {
#pragma unroll 4
        for (int u = 0; u < n; ++u) largest = Elements<T>::max(largest, *held(u, 0));
        const Pack beyond = Elements<T>::max(largest, bound);
        bool exceeded = false;
#pragma unroll
        for (int w = 0; w < 4; ++w) exceeded |= beyond.word[w] != bound.word[w];
        if (exceeded) {
          C pivot[kWidth], limit[kWidth];
          pivots_of(pivot, largest);
          Elements<T>::widen(limit, bound);
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            if (!(pivot[s] > limit[s])) continue;  // each for itself, so that its bits depend on nobody else's
            relative[s] = Relative<M>(pivot[s]);
            states.sum[s] *= relative[s].rescale(states.pivot[s]);
            states.pivot[s] = pivot[s];
            limit[s] = pivot[s] + M::constant(kTilePassLag);
          }
          if (!kSeparate) {
#pragma unroll
            for (int e = 1; e < kWidth; ++e) limit[e] = limit[0];
          }
          bound = Elements<T>::narrow(limit);
        }
      }
#pragma unroll 4
      for (int u = 0; u < n; ++u) {
        Pack raw[kInputs] = {};
#pragma unroll
        for (int k = Op::kFirstSummed; k < kInputs; ++k) raw[k] = *held(u, k);
        typename A::Values values;
        A::widen(values, raw);
        C terms[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) terms[e] = Op::term(relative[kSeparate ? e : 0], values[e]);
        states.add(terms);
      }
    });
    if constexpr (Op::kHasPivot) {
      C pivot[kWidth];
      pivots_of(pivot, largest);
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        states.sum[s] *= Relative<M>(pivot[s]).rescale(states.pivot[s]);
        states.pivot[s] = pivot[s];
      }
    }
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

  if (!part.owns()) return;
  typename Op::Row row[kStates];
  States::for_columns(part, [&](int s, int column) { row[s] = Op::row(of_tile[column]); });
  Line line = part.top;
  for_packs(Constant<0>(), [&](int i, auto n, auto held) {
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
