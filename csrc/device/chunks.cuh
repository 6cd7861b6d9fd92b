// The schedule `chunks`: a row is cut into chunks of up to 16 or 18 KB of all operands, each held in shared memory by a
// team. How a row is cut, and so every bit of the results, does not depend on how many chunks a block has.
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
  using PackLocation = typename Row::PackLocation;
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

  // The address in shared memory of the chunk's j-th pack of operand k.
  __device__ __forceinline__ Pack* held(int k, int j) const { return shared + k * kShare + j; }
  __device__ __forceinline__ int pack_of(int p) const { return rank + p * kThreads; }
  // Whether the chunk has a j-th pack. Where the compiler knows that all chunks have it, there is no check.
  __device__ __forceinline__ bool exists(int j) const {
    return j < kShare && number < kChunks && (kChunks * kShare <= Row::kPacks || number * kShare + j < Row::kPacks);
  }
  __device__ __forceinline__ PackLocation locate(int j) const { return row.locate(number * kShare + j); }
  __device__ __forceinline__ unsigned unmasked(const PackLocation& location) const {
    return mem.unmasked(location, location.inside());
  }

  // Copies the thread's packs to shared memory, where it alone reads them.
  __device__ __forceinline__ void copy() const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const PackPointers<Row, const In, kThreads> in(mem.in(k), row, number * kShare + rank);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int j = pack_of(p);
        const auto location = locate(j);
        if (!exists(j) || !location.any()) continue;
        if constexpr (Mem::kPacks) {
          copy_pack(held(k, j), in(p, location));
        } else {
          *held(k, j) = Mem::load(in(p, location), location.inside());
        }
      }
    }
  }

  // Calls body(j, packs, location) for each run of which the chunk has a part: `packs` contiguous packs, from the
  // chunk's j-th pack on, whose location is given. Packs without an element of the run are left out.
  template <class Body>
  __device__ __forceinline__ void for_runs(Body body) const {
    const int begin = number * kShare, end = min(begin + kShare, static_cast<int>(Row::kPacks));
    for (int run = begin / static_cast<int>(Row::kRunPacks), run_begin = run * static_cast<int>(Row::kRunPacks);
         run_begin < end; ++run, run_begin += Row::kRunPacks) {
      const int shift = -static_cast<int>(row.locate(run_begin).first);
      const int from = max(begin, run_begin + shift / kWidth);
      const int to = min(end, run_begin + static_cast<int>((shift + Row::kRunElements + kWidth - 1) / kWidth));
      if (from < to) body(from - begin, to - from, row.locate(from));
    }
  }

  // Calls body(j, location) for the edges among the thread's packs: those with elements outside of their run. They have
  // a loop of their own, since branches for them would slow down the unrolled loops. A contiguous row has edges at its
  // beginning and end alone.
  template <class Body>
  __device__ __forceinline__ void for_edges(Body body) const {
    const auto visit = [&](int j) {
      const PackLocation location = locate(j);
      if (!location.whole()) body(j, location);
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
    const auto pad = [&](int j, const PackLocation& location, unsigned bits) {
      Pack raw[kInputs];
      const bool any = location.any();
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = any ? *held(k, j) : Mem::pad_pack(k);
      Mem::put_pads(raw, bits);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) *held(k, j) = raw[k];
    };
    if constexpr (Mem::kIdentityLoad && Mem::kMasked) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int j = pack_of(p);
        if (!exists(j)) continue;
        const PackLocation location = locate(j);
        const unsigned bits = unmasked(location);
        if (bits != Mem::kAll) pad(j, location, bits);
      }
    } else if constexpr (Mem::kIdentityLoad) {
      for_edges([&](int j, const PackLocation& location) { pad(j, location, location.inside()); });
    }
  }

  // The state of the packs that the thread's warp has.
  __device__ __forceinline__ StateOf<Op> warp_state() const {
    put_pads();
    // Packs stay in registers from one pass to the next.
    typename Mem::Cached packs[Op::kHasPivot ? kPacks : 1];
    const auto bits_of = [&](int p) {
      return Mem::kIdentityLoad ? Mem::kAll : exists(pack_of(p)) ? unmasked(locate(pack_of(p))) : 0;
    };
    const auto read = [&](int p) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        raw[k] = Mem::pad_pack(k);
        if (exists(pack_of(p))) raw[k] = *held(k, pack_of(p));
      }
      mem.cache(packs[Op::kHasPivot ? p : 0], raw, locate(pack_of(p)), bits_of(p));
    };
    C pivot = M::constant(0);
    if constexpr (Op::kHasPivot) {
      MaxOfPacks<Mem> largest;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        read(p);
        largest.add(mem, packs[Op::kHasPivot ? p : 0], locate(pack_of(p)), bits_of(p));
      }
      pivot = max_over_lanes<32, M>(largest.get());
    }
    const auto terms_of_row = mem.terms(pivot, row.begin);
    typename Op::Sum sum{};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (!Op::kHasPivot) read(p);
      typename Mem::Values values;
      mem.values(values, packs[Op::kHasPivot ? p : 0], locate(pack_of(p)), bits_of(p));
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

  // Stores the results of the thread's packs, given the row's state and the pivot of the thread's warp.
  __device__ __forceinline__ void finish(const StateOf<Op>& state, C pivot) const {
    const auto finished = mem.finished(state, row.begin);
    typename Op::Scale scale{};
    if constexpr (Mem::kTermsFit) scale = mem.term_scale(state, pivot, row.begin);
    const auto addend = mem.addend(row.begin);
    const PackPointers<Row, typename Mem::Out, kThreads> out(mem.out(), row, number * kShare + rank);
    const auto store = [&](typename Mem::Out* to, int j, const PackLocation& location, unsigned bits, unsigned inside,
                           bool adds_at_label) {
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
        mem.values(values, raw, location, bits);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) result[i] = Op::finish(finished, values[i]);
      }
      const bool counts = Mem::mask_and_add(result, bits, addend, location.column(), adds_at_label);
      mem.store(to, location.offsets.element, result, counts, location, inside);
    };
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int j = pack_of(p);
      const auto location = locate(j);
      if (!exists(j) || !location.whole()) continue;
      store(out(p, location), j, location, Mem::kMasked ? unmasked(location) : Mem::kAll, Mem::kAll, false);
    }
    for_edges([&](int j, const PackLocation& location) {
      if (location.any())
        store(mem.out() + location.offsets.element, j, location, unmasked(location), location.inside(), true);
    });
    // The label's pack is stored a second time, by the same thread: the unrolled loop has no branch for it.
    if constexpr (Op::kAddsAtLabel) {
      if (addend.column < 0 || addend.column >= Mem::kColumns) return;
      const int j = row.pack_of(addend.column) - number * kShare;
      if (j < 0 || !exists(j) || j % kThreads != rank) return;
      const PackLocation location = locate(j);
      if (location.whole())
        store(mem.out() + location.offsets.element, j, location, unmasked(location), Mem::kAll, true);
    }
  }
};

// The row's state, from those of the warps of a block whose first chunk is `begin`. The blocks of a cluster send theirs
// to each other's `words`, counted by the barrier `received`.
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
    // The block has all chunks. Their states are combined in the same order as those of a cluster.
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
