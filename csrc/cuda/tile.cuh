// The schedule for rows that are not runs of memory: a block, or the blocks of a cluster, hold neighbouring rows in
// shared memory, read once and written once.
//
// Memory is seen as lines, runs of neighbouring elements one for each index of the reduced dimensions outside of it,
// and a tile is some packs of each line. Whatever the view, a thread's packs lie in lines so far apart that the same
// element of each belongs to the same row. So a thread keeps a state for each position in a pack (or one, if a pack
// belongs to one row), and needs no other index while it goes down the lines. Lines of several dimensions that begin
// anywhere take turns for that, and are listed once for a block.
//
// Threads that share rows add up their states by shuffles where lanes lie right, then through shared memory, and the
// blocks of a cluster send each other theirs. Memory is written in whole packs: where lines may begin anywhere in one,
// a tile reads some columns beyond its own, and stores the packs that begin in its own.
#pragma once

#include "cuda/tile_states.cuh"

namespace jax_softmax::cuda {

// The results of a pack, each of whose elements has a row of its own, or all the same.
template <class A, int n>
__device__ __forceinline__ Pack finish_separately(const typename A::Op::Row (&row)[n], const Pack (&raw)[A::kInputs]) {
  typename A::Values values;
  A::widen(values, raw);
  typename A::C results[A::kWidth];
#pragma unroll
  for (int e = 0; e < A::kWidth; ++e) results[e] = A::Op::finish(row[n == 1 ? 0 : e], values[e]);
  return Elements<typename A::T>::narrow(results);
}

// How the results are made of a row's state: terms that are kept need its scale alone.
template <class A>
inline constexpr bool kTileKeepsTerms = A::Op::kResultIsScaledTerm && sizeof(typename A::T) == sizeof(typename A::C);

template <class A, bool kSeparate, Lines kLines>
__global__ void __launch_bounds__(kTileThreads, 3) rows_in_tile(const __grid_constant__ TileArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  using States = TileStates<A, kSeparate, kLines>;
  constexpr int kWidth = A::kWidth, kInputs = A::kInputs, kStates = States::kStates;
  constexpr bool kKeepsTerms = kTileKeepsTerms<A>;
  using Final = std::conditional_t<kKeepsTerms, State<C>, typename Op::Row>;
  extern __shared__ __align__(128) Pack shared[];
  const A& access = args.access;
  const Tile& tile = args.tile;
  const int threads = blockDim.x;
  const unsigned index = args.cluster.divide(blockIdx.x);
  const int rank = blockIdx.x - index * tile.cluster;
  const bool clustered = tile.cluster > 1;
#if __CUDA_ARCH__ >= 900
  uint64_t* const received =
      reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(shared + tile.held * kInputs * threads) + tile.received_at);
  if (clustered) begin_exchange(received, tile.cluster * tile.columns * static_cast<int>(sizeof(State<C>)));
#endif
  using Part = TilePart<A, kSeparate, kLines, true>;
  Offset* const offsets = reinterpret_cast<Offset*>(reinterpret_cast<char*>(shared) + tile.offsets_at);
  if (Part::turning(args)) Part::list_offsets(args, rank, offsets);
  const Part part(args, index, rank, tile.all_lines, offsets, {0, 0});

  // Each thread reads only what it has copied itself, so that there is no need for a barrier.
  Pack* const mine = shared + threadIdx.x;
  const auto at = [&](int i, int k) { return mine + (i * kInputs + k) * threads; };
  part.for_lines(part.readable, [&](int i, const auto& line, auto simple) {
    part.template copy<decltype(simple)::value>(line, [&](int k) { return at(i, k); });
  });
  wait_for_copies();
  if (part.mends()) {
    part.for_lines(part.storable,
                   [&](int i, const auto& line, auto) { part.mend(line, [&](int k) { return at(i, k); }); });
  }

  States states;
  Pack largest = A::pad_pack(0);
  if constexpr (Op::kHasPivot) {
#pragma unroll 8
    for (int i = 0; i < part.lines; ++i) largest = Elements<T>::max(largest, *at(i, 0));
  }
  states.set_pivot(tile, largest);
  {
    Relative<M> relative[kStates];
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      relative[s] = Relative<M>(states.pivot[s]);
      states.sum[s] = M::constant(0);
    }
#pragma unroll 4
    for (int i = 0; i < part.lines; ++i) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = *at(i, k);
      typename A::Values values;
      A::widen(values, raw);
      C terms[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) terms[e] = Op::term(relative[kSeparate ? e : 0], values[e]);
      if constexpr (kKeepsTerms) *at(i, 0) = Elements<T>::narrow(terms);
      states.add(terms);
    }
    states.add_lanes(tile);
  }

  const auto final_of = [](const State<C>& state) -> Final {
    if constexpr (kKeepsTerms) {
      return state;
    } else {
      return Op::row(state);
    }
  };
  Final final[kStates];
  if (!tile.exchanged) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) final[s] = final_of({states.pivot[s], states.sum[s]});
  } else {
    static_assert(sizeof(Final) <= kPackBytes);
    char* const beyond = reinterpret_cast<char*>(shared + tile.held * kInputs * threads);
    State<C>* const entries = reinterpret_cast<State<C>*>(beyond);
    uint64_t* const of_blocks = reinterpret_cast<uint64_t*>(beyond + tile.of_blocks_at);
    Final* const finals = reinterpret_cast<Final*>(beyond + tile.finals_at);
    const auto final_at = [&](int column) -> Final& { return finals[States::slot_of(column)]; };
#if __CUDA_ARCH__ >= 900
    if (clustered) wait_until_all_have_begun();
#endif
    states.combine(part, entries, [&](int column, const State<C>& state, int lane, int team) {
      if (clustered) {
#if __CUDA_ARCH__ >= 900
        const WordsInCluster<C> exchange{of_blocks, received};
        for (int block = lane; block < tile.cluster; block += team) {
          exchange.publish(rank * tile.columns + column, state, block);
        }
#endif
      } else if (lane == 0) {
        final_at(column) = final_of(state);
      }
    });
#if __CUDA_ARCH__ >= 900
    if (clustered) {
      wait_for_cluster(received, 0);
      __syncthreads();  // the entries have been read, and make room
      const int team = 1 << args.team_shift, lane = threadIdx.x % team;
      for (int at = threadIdx.x; at - static_cast<int>(threadIdx.x % 32) < tile.columns * team; at += threads) {
        const int column = at >> args.team_shift;
        const State<C> state = combine_over_team<Op, M>(
            combine_entries<Op, M>(lane, column < tile.columns ? tile.cluster : 0, team,
                                   [&](int block) {
                                     uint64_t words[kStateWords<C>];
#pragma unroll
                                     for (int w = 0; w < kStateWords<C>; ++w) {
                                       words[w] = of_blocks[(block * tile.columns + column) * kStateWords<C> + w];
                                     }
                                     return from_words(words);
                                   }),
            team);
        if (lane == 0 && column < tile.columns) final_at(column) = final_of(state);
      }
    }
#endif
    __syncthreads();
    if (kSeparate && kLines != Lines::kRuns && tile.inner == 1) {
      States::for_slots(part, [&](int s, int slot) { final[s] = finals[slot]; });
    } else {
      States::for_columns(part, [&](int s, int column) { final[s] = final_at(column); });
    }
  }

  typename Op::Scale scale[kStates];
  if constexpr (kKeepsTerms) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) scale[s] = Op::term_scale(final[s], states.pivot[s]);
  }
  const auto result_of = [&](int i) {
    Pack raw[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) raw[k] = *at(i, k);
    if constexpr (kKeepsTerms) {
      C terms[kWidth];
      Elements<T>::widen(terms, raw[0]);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) terms[e] = terms[e] * scale[kSeparate ? e : 0];
      return Elements<T>::narrow(terms);
    } else {
      return finish_separately<A>(final, raw);
    }
  };
  if (!part.owns()) return;
  part.for_lines(part.storable, [&](int i, const auto& line, auto simple) {
    part.template store<decltype(simple)::value>(line, result_of(i));
  });
}

}  // namespace jax_softmax::cuda
