// The schedule `ring`, for rows of many chunks, and many of them: a block to a multiprocessor, each with a ring of
// stages in shared memory that chunks pass through.
//
// The blocks take the chunks of all rows in their order, by ticket, and each chunk passes through the ring from one
// group of warps to the next, by barriers that say:
//
//   one thread            takes a ticket and has its two chunks copied           full
//   teams of warps        sum the terms                                          summed
//   one warp              publishes the chunks' states                           complete
//   one or two warps      wait for those of the whole row                        complete
//   teams of warps        write the results                                      empty
//
// So copies are under way all the time, an exchange that takes its while keeps nobody from working, and a
// multiprocessor that is slower than others takes fewer chunks. A chunk with a stage is published without waiting for
// anybody; so all progress as long as all rings together hold a row, and the blocks all run (a cooperative launch).
#pragma once

#include "device/chunks.cuh"

namespace jax_softmax::device {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copy_bulk(Pack* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
#endif

// The place in a block's ring: a stage, and the parity of the rounds.
template <int kStages>
struct Turn {
  int number = 0;
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    ++number;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <class Mem, class Plan>
__device__ __forceinline__ void ring(const typename Mem::Operands& operands) {
#if __CUDA_ARCH__ >= 900
  using Op = typename Mem::Op;
  using State = StateOf<Op>;
  using R = Row<Mem, Plan>;
  using Work = Chunk<Mem, Plan>;
  constexpr Ring kPlan = Plan::kPlan;
  constexpr int kWords = kStateWords<State>;
  constexpr int kTeamWarps = Work::kWarps, kStages = kPlan.stages, kCopies = kPlan.copies;
  constexpr int kSummers = kPlan.summers, kWriters = kPlan.writers, kWaiters = kPlan.waiters;  // teams, and warps
  constexpr unsigned kChunks = kPlan.chunks;
  constexpr int kChunkPacks = packs_of_chunk(kPlan, Plan::kFootprint);
  constexpr unsigned kEnd = ~0u;
  constexpr int kEnds = kSummers > kWriters ? kSummers : kWriters;
  constexpr int kSumWarps = kPlan.summing_warps(), kTeamsWarps = kPlan.copying_warp();
  extern __shared__ __align__(128) Pack shared[];
  __shared__ uint64_t full[kStages], summed[kStages], complete[kStages], empty[kStages];
  __shared__ unsigned ticket_of[kStages];
  __shared__ State part[kStages][kTeamWarps];
  __shared__ State finished[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(&full[s], 1);
      init_barrier(&summed[s], Work::kThreads);
      init_barrier(&complete[s], 2 * 32);  // of two warps, each lane for itself: it has read what the stage holds
      init_barrier(&empty[s], Work::kThreads);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const Mem mem{operands};
  const unsigned last_item = static_cast<unsigned>(operands.rows) * kChunks - 1;
  const auto with_chunk = [&](unsigned item, int stage, auto body) {
    const unsigned index = item / kChunks;
    const R row(index);
    body(Work{mem, row, static_cast<int>(item - index * kChunks), shared + stage * kChunkPacks});
  };
  const auto words_of = [&](unsigned row) {
    return WordsInMemory<State>{operands.words + static_cast<int64_t>(row) * kChunks * kWords};
  };
  Turn<kStages> turn;

  if (warp < kSumWarps) {
    for (;; turn.next()) {
      if (turn.number % kSummers != warp / kTeamWarps) continue;
      wait(&full[turn.stage], turn.parity);
      const unsigned item = ticket_of[turn.stage];
      if (item == kEnd) return;
      with_chunk(item, turn.stage, [&](const Work& work) {
        const State state = work.warp_state();
        if (lane == 0) part[turn.stage][warp % kTeamWarps] = state;
      });
      arrive(&summed[turn.stage]);  // each lane for itself: it may have written to the stage
    }
  }
  if (warp < kTeamsWarps) {
    for (;; turn.next()) {
      if (turn.number % kWriters != (warp - kSumWarps) / kTeamWarps) continue;
      wait(&complete[turn.stage], turn.parity);
      const unsigned item = ticket_of[turn.stage];
      if (item == kEnd) return;
      with_chunk(item, turn.stage, [&](const Work& work) {
        if (work.chunk == 0 && work.rank == 0) {
          mem.store_row(item / kChunks, finished[turn.stage], mem.of_row(work.row.begin));
        }
        work.finish(finished[turn.stage], part[turn.stage][warp % kTeamWarps].pivot);
      });
      // What was read and written here comes before the next copy, which takes another way to shared memory.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      arrive(&empty[turn.stage]);
    }
  }
  if (warp == kTeamsWarps) {
    if (lane != 0) return;
    // A ticket is asked for ahead of time, since the answer takes its while, but not if all stages could then hold
    // chunks of the row that a chunk without a stage belongs to: none of them would ever be empty again.
    unsigned* const counter = reinterpret_cast<unsigned*>(operands.words + operands.rows * kChunks * kWords);
    const auto next_ticket = [&] { return gridDim.x + atomicAdd(counter, 1u); };
    unsigned ticket = blockIdx.x;
    unsigned row = kEnd;
    int of_row = 0;  // chunks taken of the latest row
    Turn<kStages>
        oldest;  // that may still be on its way: more at once would only keep one another and the results waiting
    while (2 * ticket <= last_item) {
      const unsigned begin = 2 * ticket, end = min(begin + 1, last_item);
      for (unsigned item = begin; item <= end; ++item) {
        if (item / kChunks != row) of_row = 0;
        row = item / kChunks;
        ++of_row;
      }
      const bool ahead = of_row + 2 <= kStages;
      unsigned next = 0;
      for (unsigned item = begin; item <= end; ++item) {
        if (turn.number >= kStages) wait(&empty[turn.stage], turn.parity ^ 1);
        if (turn.number >= kCopies) {
          wait(&full[oldest.stage], oldest.parity);
          oldest.next();
        }
        ticket_of[turn.stage] = item;
        with_chunk(item, turn.stage, [&](const Work& work) {
          int bytes = 0;
          work.for_runs([&](int, int packs, const typename R::At&) { bytes += packs * kPackBytes * Mem::kInputs; });
          arrive_and_expect(&full[turn.stage], bytes);
          work.for_runs([&](int j, int packs, const typename R::At& at) {
#pragma unroll
            for (int k = 0; k < Mem::kInputs; ++k) {
              copy_bulk(work.held(k, j), mem.in(k) + at.place.element, packs * kPackBytes, &full[turn.stage]);
            }
          });
        });
        turn.next();
        if (item == begin && ahead) next = next_ticket();
      }
      if (!ahead) {
        for (Turn<kStages> free = turn; free.number < turn.number + 2; free.next()) {
          if (free.number >= kStages) wait(&empty[free.stage], free.parity ^ 1);
        }
        next = next_ticket();
      }
      ticket = next;
    }
    for (int i = 0; i < kEnds; ++i, turn.next()) {  // one for each team
      if (turn.number >= kStages) wait(&empty[turn.stage], turn.parity ^ 1);
      ticket_of[turn.stage] = kEnd;
      arrive(&full[turn.stage]);
    }
    return;
  }
  if (warp == kPlan.publishing_warp()) {
    for (int ends = 0;; turn.next()) {
      wait(&full[turn.stage], turn.parity);
      const unsigned item = ticket_of[turn.stage];
      if (item != kEnd) {
        wait(&summed[turn.stage], turn.parity);
        const State state = combine_over_lanes<Op, kTeamWarps>(part[turn.stage][lane % kTeamWarps]);
        if (lane == 0) words_of(item / kChunks).publish(static_cast<int>(item % kChunks), state);
      }
      arrive(&complete[turn.stage]);
      if (item == kEnd && ++ends == kWriters) return;  // each team of writers has been told
    }
  }
  State state = identity<Op, typename Mem::M>();
  unsigned row = kEnd;
  for (int ends = 0;; turn.next()) {
    if (turn.number % kWaiters != warp - kPlan.first_waiter()) continue;
    wait(&full[turn.stage], turn.parity);
    const unsigned item = ticket_of[turn.stage];
    if (item != kEnd) {
      wait(&summed[turn.stage], turn.parity);
      if (item / kChunks != row) {
        row = item / kChunks;
        state = await_row<Op, static_cast<int>(kChunks), 2>(words_of(row));
      }
      if (lane == 0) finished[turn.stage] = state;
    }
    arrive(&complete[turn.stage]);
    if (item == kEnd && ++ends == kWriters / kWaiters) return;  // each team of writers has been told
  }
#endif
}

}  // namespace jax_softmax::device
