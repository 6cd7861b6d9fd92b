// The schedule `chunks`: a row is cut into chunks of up to 16 or 18 KB of all operands together, which teams of threads
// hold in shared memory. A row's chunks, and so its bits, are the same however many of them a block has and however
// blocks exchange their states.
#pragma once

#include "device/copies.cuh"
#include "device/exchange.cuh"
#include "device/row.cuh"
#include "geometry/chunks.h"

namespace jax_softmax::device {

// A chunk as one thread of its team sees it, which has the packs rank + p * kThreads.
template <class Mem, class Plan>
struct Chunk {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using R = Row<Mem, Plan>;
  using At = typename R::At;
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth;
  static constexpr int kThreads = Plan::kPlan.team_threads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kShare = Plan::kPlan.share;    // packs of each operand in a chunk
  static constexpr int kChunks = Plan::kPlan.chunks;  // of a row
  static constexpr int kPacks = static_cast<int>(ceil_div(kShare, kThreads));

  const Mem& mem;
  const R& row;
  const int chunk;
  Pack* const shared;
  const int rank = threadIdx.x % kThreads;

  __device__ __forceinline__ Pack* held(int k, int j) const { return shared + k * kShare + j; }
  __device__ __forceinline__ int pack_of(int p) const { return rank + p * kThreads; }
  // Whether the chunk has the pack: most are in all chunks but a row's last.
  __device__ __forceinline__ bool exists(int j) const {
    return j < kShare && chunk < kChunks && (kChunks * kShare <= R::kPacks || chunk * kShare + j < R::kPacks);
  }
  __device__ __forceinline__ At at(int j) const { return row.at(chunk * kShare + j); }
  __device__ __forceinline__ unsigned kept(const At& at) const { return mem.unmasked(at, at.inside()); }

  // Copies the thread's packs to shared memory, where it alone reads them.
  __device__ __forceinline__ void copy() const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const Pointer<R, const In, kThreads> in(mem.in(k), row, chunk * kShare + rank);
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

  // Calls body(j, packs, at) for the packs of the chunk that hold some of the row: those of each run, from the j-th of
  // the chunk on, are neighbours in memory.
  template <class Body>
  __device__ __forceinline__ void for_runs(Body body) const {
    const int begin = chunk * kShare, end = min(begin + kShare, static_cast<int>(R::kPacks));
    for (int run = begin / static_cast<int>(R::kRunPacks), run_begin = run * static_cast<int>(R::kRunPacks);
         run_begin < end; ++run, run_begin += R::kRunPacks) {
      const int shift = -static_cast<int>(row.at(run_begin).first);
      const int from = max(begin, run_begin + shift / kWidth);
      const int to = min(end, run_begin + static_cast<int>((shift + R::kRun + kWidth - 1) / kWidth));
      if (from < to) body(from - begin, to - from, row.at(from));
    }
  }

  // Calls body(j, at) for those of the thread's packs that are not all the row's: out of the way of the unrolled loops,
  // which their rarely taken branches would fill. A contiguous row has them at its beginning and end alone.
  template <class Body>
  __device__ __forceinline__ void for_edges(Body body) const {
    const auto visit = [&](int j) {
      const At place = at(j);
      if (!place.whole()) body(j, place);
    };
    if constexpr (R::kExact) {
      return;
    } else if constexpr (R::kRuns > 1) {
#pragma unroll 1
      for (int j = rank; exists(j); j += kThreads) visit(j);
    } else {
      static_assert(R::kBoundary <= kThreads * kWidth);
      if (chunk == 0 && exists(rank)) visit(rank);
      const int end = static_cast<int>((R::shift_of(row.begin) + R::kRun) / kWidth) - chunk * kShare;
      if (end >= kShare) return;
      const int from = max(end, chunk == 0 ? kThreads : 0);
#pragma unroll 1
      for (int j = from + (rank - from % kThreads + kThreads) % kThreads; exists(j); j += kThreads) visit(j);
    }
  }

  // Puts pads in the place of what does not count, where memory can hold pads.
  __device__ __forceinline__ void mend() const {
    const auto mend_pack = [&](int j, const At& place, unsigned bits) {
      Pack raw[kInputs];
      const bool any = place.any();
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = any ? *held(k, j) : Mem::pad_pack(k);
      Mem::mend(raw, bits);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) *held(k, j) = raw[k];
    };
    if constexpr (Mem::kOrdered && Mem::kMasked) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int j = pack_of(p);
        if (!exists(j)) continue;
        const At place = at(j);
        const unsigned bits = kept(place);
        if (bits != Mem::kAll) mend_pack(j, place, bits);
      }
    } else if constexpr (Mem::kOrdered) {
      for_edges([&](int j, const At& place) { mend_pack(j, place, place.inside()); });
    }
  }

  // The state of the warp's packs.
  __device__ __forceinline__ StateOf<Op> warp_state() const {
    mend();
    // In registers from one pass to the next, but for float64, whose exponential needs many, and for elements of 8
    // bits, of which a pack has many.
    constexpr bool kHold = sizeof(C) == 4 && sizeof(In) > 1 && Op::kHasPivot;
    typename Mem::Held packs[kHold ? kPacks : 1];
    const auto bits_of = [&](int p) {
      return Mem::kOrdered ? Mem::kAll : exists(pack_of(p)) ? kept(at(pack_of(p))) : 0;
    };
    const auto read = [&](int p) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        raw[k] = Mem::pad_pack(k);
        if (exists(pack_of(p))) raw[k] = *held(k, pack_of(p));
      }
      mem.hold(packs[kHold ? p : 0], raw, at(pack_of(p)), bits_of(p));
    };
    C pivot = M::constant(0);
    if constexpr (Op::kHasPivot) {
      Largest<Mem> largest;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        read(p);
        largest.add(mem, packs[kHold ? p : 0], at(pack_of(p)), bits_of(p));
      }
      pivot = max_over_lanes<32, M>(largest.get());
    }
    const auto terms_of_row = mem.terms(pivot, row.begin);
    typename Op::Sum sum{};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (!kHold) read(p);
      typename Mem::Values values;
      mem.values(values, packs[kHold ? p : 0], at(pack_of(p)), bits_of(p));
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

  // `state` is the row's, `pivot` that of the warp whose packs these are.
  __device__ __forceinline__ void finish(const StateOf<Op>& state, C pivot) const {
    const auto finished = mem.row(state, row.begin);
    typename Op::Scale scale{};
    if constexpr (Mem::kTermsFit) scale = mem.term_scale(state, pivot, row.begin);
    const auto addend = mem.addend(row.begin);
    const Pointer<R, typename Mem::Out, kThreads> out(mem.out(), row, chunk * kShare + rank);
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
      const bool counts = Mem::complete(result, bits, addend, place.column());
      mem.store(to, place.place.element, result, counts, place, inside);
    };
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int j = pack_of(p);
      const auto place = at(j);
      if (!exists(j) || !place.whole()) continue;
      store(out(p, place), j, place, Mem::kMasked ? kept(place) : Mem::kAll, Mem::kAll);
    }
    for_edges([&](int j, const At& place) {
      if (place.any()) store(mem.out() + place.place.element, j, place, kept(place), place.inside());
    });
  }
};

// A block has kTeams neighbouring chunks of a row, a team each. What is left of the row belongs to the other blocks of
// its cluster or, if they exchange states through memory, to any.
template <class Mem, class Plan>
__device__ __forceinline__ void chunks(const typename Mem::Operands& operands) {
  using Op = typename Mem::Op;
  using State = StateOf<Op>;
  using Work = Chunk<Mem, Plan>;
  constexpr int kWords = kStateWords<State>;
  constexpr int kChunks = Plan::kPlan.chunks, kTeams = Plan::kPlan.teams, kTeamThreads = Work::kThreads,
                kTeamWarps = Work::kWarps;
  constexpr int kChunkPacks = packs_of_chunk(Plan::kPlan, Plan::kFootprint);
  constexpr int kBlocks = Plan::kPlan.blocks_of_row();
  constexpr bool kClustered = Plan::kPlan.cluster > 1;
  extern __shared__ __align__(128) Pack shared[];
  __shared__ State part[kTeams * kTeamWarps];
  __shared__ uint64_t words[kClustered ? kBlocks * kTeams * kWords : 1];
  __shared__ uint64_t received;
  const int team = threadIdx.x / kTeamThreads;
  const int64_t index = blockIdx.x / kBlocks;
  const int begin = static_cast<int>(blockIdx.x - index * kBlocks) * kTeams;
#if __CUDA_ARCH__ >= 900
  if constexpr (kClustered) begin_exchange(&received, kChunks * kWords * 8);
#endif

  const Mem mem{operands};
  const Row<Mem, Plan> row(index);
  const Work work{mem, row, begin + team, shared + team * kChunkPacks};
  work.copy();
  const auto of_row = mem.of_row(row.begin);
  wait_for_copies();
  const State warp = work.warp_state();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = warp;
#if __CUDA_ARCH__ >= 900
  if constexpr (kClustered) wait_until_all_have_begun();
#endif
  __syncthreads();
  State state;
  if constexpr (Plan::kPlan.through_memory) {
    wait_for_previous_kernel();
    const WordsInMemory<State> exchange{operands.words + index * kChunks * kWords};
    state = combine_over_lanes<Op, kTeamWarps>(part[team * kTeamWarps + threadIdx.x % kTeamWarps]);
    if (work.rank == 0 && begin + team < kChunks) exchange.publish(begin + team, state);
    state = await_row<Op, kChunks>(exchange);
  } else if constexpr (kClustered) {
    // One warp tells every block of the cluster, this one as well.
    const WordsInCluster<State> exchange{words, &received};
    if (threadIdx.x < 32) {
      for (int t = 0; t < kTeams && begin + t < kChunks; ++t) {
        state = combine_over_lanes<Op, kTeamWarps>(part[t * kTeamWarps + threadIdx.x % kTeamWarps]);
        if (static_cast<int>(threadIdx.x) < kBlocks) exchange.publish(begin + t, state, threadIdx.x);
      }
      __syncwarp();
    }
#if __CUDA_ARCH__ >= 900
    wait_for_cluster(&received, 0);
#endif
    state = await_row<Op, kChunks>(exchange);
  } else {
    // The chunks' states some lanes apart, whose sum has the same order as that of neighbouring lanes.
    const int lane = threadIdx.x % 32;
    state = lane < kTeams * kTeamWarps ? part[lane] : identity<Op, typename Mem::M>();
    state = combine_over_lanes<Op, kTeamWarps>(state);
    if (lane % kTeamWarps != 0) state = identity<Op, typename Mem::M>();
    state = combine_over_lanes<Op, 32>(state);
  }
  if (work.chunk == 0 && work.rank == 0) mem.store_row(index, state, of_row);
  work.finish(state, warp.pivot);
}

}  // namespace jax_softmax::device
