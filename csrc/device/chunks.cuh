// The schedule `chunks`: a row is cut into chunks of up to 16 or 18 KB of all operands together. Each is held in shared
// memory by a team of threads. How a row is cut does not depend on how many chunks a block has, so that does not change
// a bit of the results.
#pragma once

#include "device/barrier.cuh"
#include "device/exchange.cuh"
#include "device/row.cuh"
#include "geometry/chunks.h"

namespace jax_softmax::device {

// One thread's share of a chunk: the packs rank, rank + kThreads, rank + 2 * kThreads, ...
template <class Mem, class Plan>
struct ChunkOfThread {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using Row = RowPacks<Mem, Plan>;
  using At = typename Row::At;
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth;
  static constexpr int kThreads = Plan::kPlan.team_threads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kShare = Plan::kPlan.share;    // packs of each operand in a chunk
  static constexpr int kChunks = Plan::kPlan.chunks;  // of a row
  static constexpr int kPacks = static_cast<int>(ceil_div(kShare, kThreads));

  const Mem& mem;
  const Row& row;
  const int number;  // of the chunk, in its row
  Pack* const shared;
  const int rank = threadIdx.x % kThreads;

  // The place in shared memory of the chunk's j-th pack of operand k.
  __device__ __forceinline__ Pack* held(int k, int j) const { return shared + k * kShare + j; }
  __device__ __forceinline__ int pack_of(int p) const { return rank + p * kThreads; }
  // Whether the chunk has a j-th pack. Where the compiler knows that all chunks have it, there is no check.
  __device__ __forceinline__ bool exists(int j) const {
    return j < kShare && number < kChunks && (kChunks * kShare <= Row::kPacks || number * kShare + j < Row::kPacks);
  }
  __device__ __forceinline__ At at(int j) const { return row.at(number * kShare + j); }
  __device__ __forceinline__ unsigned unmasked(const At& at) const { return mem.unmasked(at, at.inside()); }

  // Copies the thread's packs to shared memory, where it alone reads them.
  __device__ __forceinline__ void copy() const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const PackPointers<Row, const In, kThreads> in(mem.in(k), row, number * kShare + rank);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int j = pack_of(p);
        const auto place = at(j);
        if (!exists(j) || !place.any()) continue;
        if constexpr (Mem::kPacks) {
          copy_pack(held(k, j), in(p, place));
        } else {
          *held(k, j) = Mem::load(in(p, place), place.inside());
        }
      }
    }
  }

  // Calls body(j, packs, at) for each run of which the chunk has a part: from the chunk's j-th pack, which lies at
  // `at`, so many packs are neighbours in memory. Packs with no element of the run are left out.
  template <class Body>
  __device__ __forceinline__ void for_runs(Body body) const {
    const int begin = number * kShare, end = min(begin + kShare, static_cast<int>(Row::kPacks));
    for (int run = begin / static_cast<int>(Row::kRunPacks), run_begin = run * static_cast<int>(Row::kRunPacks);
         run_begin < end; ++run, run_begin += Row::kRunPacks) {
      const int shift = -static_cast<int>(row.at(run_begin).first);
      const int from = max(begin, run_begin + shift / kWidth);
      const int to = min(end, run_begin + static_cast<int>((shift + Row::kRunElements + kWidth - 1) / kWidth));
      if (from < to) body(from - begin, to - from, row.at(from));
    }
  }

  // Calls body(j, at) for the thread's packs with elements beyond their run. They have a loop of their own, since the
  // branches for them would slow down the unrolled loops. A contiguous row has such packs at its beginning and end
  // alone.
  template <class Body>
  __device__ __forceinline__ void for_edges(Body body) const {
    const auto visit = [&](int j) {
      const At place = at(j);
      if (!place.whole()) body(j, place);
    };
    if constexpr (Row::kExact) {
      return;
    } else if constexpr (Row::kRuns > 1) {
#pragma unroll 1
      for (int j = rank; exists(j); j += kThreads) visit(j);
    } else {
      static_assert(Row::kBoundary <= kThreads * kWidth);
      if (number == 0 && exists(rank)) visit(rank);
      const int end = static_cast<int>((Row::shift_of(row.begin) + Row::kRunElements) / kWidth) - number * kShare;
      if (end >= kShare) return;
      const int from = max(end, number == 0 ? kThreads : 0);
#pragma unroll 1
      for (int j = from + (rank - from % kThreads + kThreads) % kThreads; exists(j); j += kThreads) visit(j);
    }
  }

  // Replaces the elements that do not count by pads, in shared memory, where memory can hold pads.
  __device__ __forceinline__ void put_pads() const {
    const auto pad = [&](int j, const At& place, unsigned bits) {
      Pack raw[kInputs];
      const bool any = place.any();
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = any ? *held(k, j) : Mem::pad_pack(k);
      Mem::put_pads(raw, bits);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) *held(k, j) = raw[k];
    };
    if constexpr (Mem::kPlain && Mem::kMasked) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int j = pack_of(p);
        if (!exists(j)) continue;
        const At place = at(j);
        const unsigned bits = unmasked(place);
        if (bits != Mem::kAll) pad(j, place, bits);
      }
    } else if constexpr (Mem::kPlain) {
      for_edges([&](int j, const At& place) { pad(j, place, place.inside()); });
    }
  }

  // The state of the packs that the thread's warp has.
  __device__ __forceinline__ StateOf<Op> warp_state() const {
    put_pads();
    // Packs stay in registers from one pass to the next.
    typename Mem::Cached packs[Op::kHasPivot ? kPacks : 1];
    const auto bits_of = [&](int p) {
      return Mem::kPlain ? Mem::kAll : exists(pack_of(p)) ? unmasked(at(pack_of(p))) : 0;
    };
    const auto read = [&](int p) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        raw[k] = Mem::pad_pack(k);
        if (exists(pack_of(p))) raw[k] = *held(k, pack_of(p));
      }
      mem.cache(packs[Op::kHasPivot ? p : 0], raw, at(pack_of(p)), bits_of(p));
    };
    C pivot = M::constant(0);
    if constexpr (Op::kHasPivot) {
      MaxOfPacks<Mem> largest;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        read(p);
        largest.add(mem, packs[Op::kHasPivot ? p : 0], at(pack_of(p)), bits_of(p));
      }
      pivot = max_over_lanes<32, M>(largest.get());
    }
    const auto terms_of_row = mem.terms(pivot, row.begin);
    typename Op::Sum sum{};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (!Op::kHasPivot) read(p);
      typename Mem::Values values;
      mem.values(values, packs[Op::kHasPivot ? p : 0], at(pack_of(p)), bits_of(p));
      typename Op::Sum terms[kWidth], part{};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) part += terms[i] = Op::term(terms_of_row, values[i]);
      sum += part;
      if constexpr (Mem::kTermsFit) {
        if (exists(pack_of(p))) *held(0, pack_of(p)) = Elements<In>::narrow(terms);
      }
    }
    return {pivot, sum_over_lanes<32>(sum)};
  }

  // Stores the results of the thread's packs, given the state of the row and the pivot of the thread's warp.
  __device__ __forceinline__ void finish(const StateOf<Op>& state, C pivot) const {
    const auto finished = mem.finished(state, row.begin);
    typename Op::Scale scale{};
    if constexpr (Mem::kTermsFit) scale = mem.term_scale(state, pivot, row.begin);
    const auto addend = mem.addend(row.begin);
    const PackPointers<Row, typename Mem::Out, kThreads> out(mem.out(), row, number * kShare + rank);
    const auto store = [&](typename Mem::Out* to, int j, const At& place, unsigned bits, unsigned inside) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = *held(k, j);
      C result[kWidth];
      if constexpr (Mem::kTermsFit) {
        Elements<In>::widen(result, raw[0]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result[i] = result[i] * scale;
      } else {
        typename Mem::Values values;
        mem.values(values, raw, place, bits);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result[i] = Op::finish(finished, values[i]);
      }
      const bool counts = Mem::mask_and_add(result, bits, addend, place.column());
      mem.store(to, place.place.element, result, counts, place, inside);
    };
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int j = pack_of(p);
      const auto place = at(j);
      if (!exists(j) || !place.whole()) continue;
      store(out(p, place), j, place, Mem::kMasked ? unmasked(place) : Mem::kAll, Mem::kAll);
    }
    for_edges([&](int j, const At& place) {
      if (place.any()) store(mem.out() + place.place.element, j, place, unmasked(place), place.inside());
    });
  }
};

// The state of the row, from those of the warps of a block, whose first chunk is `begin`. If the blocks of a cluster
// have the row, all of them send theirs to each other: to `words`, counted by the barrier `received`.
template <class Mem, class Plan>
__device__ __forceinline__ StateOf<typename Mem::Op> state_of_row(const StateOf<typename Mem::Op>* warp_states,
                                                                  int begin, uint64_t* words, uint64_t* received) {
  using Op = typename Mem::Op;
  using State = StateOf<Op>;
  constexpr int kChunks = Plan::kPlan.chunks, kTeams = Plan::kPlan.teams, kBlocks = Plan::kPlan.cluster,
                kTeamWarps = Plan::kPlan.team_threads / 32;
  State state;
  if constexpr (kBlocks > 1) {
    // One warp sends the states of the block's chunks to all blocks of the cluster, this one included.
    const WordsInCluster<State> exchange{words, received};
    if (threadIdx.x < 32) {
      for (int t = 0; t < kTeams && begin + t < kChunks; ++t) {
        state = combine_over_lanes<Op, kTeamWarps>(warp_states[t * kTeamWarps + threadIdx.x % kTeamWarps]);
        if (static_cast<int>(threadIdx.x) < kBlocks) exchange.publish(begin + t, state, threadIdx.x);
      }
      __syncwarp();
    }
#if __CUDA_ARCH__ >= 900
    wait_for_cluster(received, 0);
#endif
    state = await_row<Op, kChunks>(exchange);
  } else {
    // All chunks are this block's. Their states are added up in the same order as those of exchanged chunks.
    const int lane = threadIdx.x % 32;
    state = lane < kTeams * kTeamWarps ? warp_states[lane] : identity<Op, typename Mem::M>();
    state = combine_over_lanes<Op, kTeamWarps>(state);
    if (lane % kTeamWarps != 0) state = identity<Op, typename Mem::M>();
    state = combine_over_lanes<Op, 32>(state);
  }
  return state;
}

// A block has kTeams neighbouring chunks of a row, and a team for each. The row's other chunks belong to the other
// blocks of its cluster.
template <class Mem, class Plan>
__device__ __forceinline__ void chunks(const typename Mem::Operands& operands) {
  using Op = typename Mem::Op;
  using State = StateOf<Op>;
  using Chunk = ChunkOfThread<Mem, Plan>;
  constexpr int kWords = kStateWords<State>;
  constexpr int kChunks = Plan::kPlan.chunks, kTeams = Plan::kPlan.teams, kTeamThreads = Chunk::kThreads;
  constexpr int kChunkPacks = packs_of_chunk(Plan::kPlan, Plan::kFootprint);
  constexpr int kBlocks = Plan::kPlan.cluster;
  constexpr bool kClustered = kBlocks > 1;
  extern __shared__ __align__(128) Pack shared[];
  __shared__ State warp_states[kTeams * Chunk::kWarps];
  __shared__ uint64_t words[kClustered ? kBlocks * kTeams * kWords : 1];
  __shared__ uint64_t received;
  const int team = threadIdx.x / kTeamThreads;
  const int64_t index = blockIdx.x / kBlocks;
  const int begin = static_cast<int>(blockIdx.x - index * kBlocks) * kTeams;
#if __CUDA_ARCH__ >= 900
  if constexpr (kClustered) begin_exchange(&received, kChunks * kWords * 8);
#endif

  const Mem mem{operands};
  const typename Chunk::Row row(index);
  const Chunk chunk{mem, row, begin + team, shared + team * kChunkPacks};
  chunk.copy();
  const auto label_element = mem.label_element(row.begin);
  wait_for_copies();
  const State warp = chunk.warp_state();
  if (threadIdx.x % 32 == 0) warp_states[threadIdx.x / 32] = warp;
#if __CUDA_ARCH__ >= 900
  if constexpr (kClustered) wait_until_all_have_begun();
#endif
  __syncthreads();
  const State state = state_of_row<Mem, Plan>(warp_states, begin, words, &received);
  if (chunk.number == 0 && chunk.rank == 0) mem.store_row(index, state, label_element);
  chunk.finish(state, warp.pivot);
}

}  // namespace jax_softmax::device
