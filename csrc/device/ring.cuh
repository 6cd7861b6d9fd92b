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
struct RingPosition {
  int count = 0;
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next() {
    ++count;
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
  using Row = RowPacks<Mem, Plan>;
  using Chunk = ChunkOfThread<Mem, Plan>;
  constexpr Ring kPlan = Plan::kPlan;
  constexpr int kWords = kStateWords<State>;
  constexpr int kTeamWarps = Chunk::kWarps, kStages = kPlan.stages, kCopies = kPlan.copies;
  constexpr int kSummers = kPlan.summers, kWriters = kPlan.writers, kWaiters = kPlan.waiters;  // teams, and warps
  constexpr unsigned kChunks = kPlan.chunks;
  constexpr int kChunkPacks = packs_of_chunk(kPlan, Plan::kFootprint);
  constexpr unsigned kEnd = ~0u;
  constexpr int kEnds = kSummers > kWriters ? kSummers : kWriters;
  constexpr int kSumWarps = kPlan.summing_warps(), kTeamsWarps = kPlan.copying_warp();
  extern __shared__ __align__(128) Pack shared[];
  __shared__ uint64_t full[kStages], summed[kStages], complete[kStages], empty[kStages];
  __shared__ unsigned job_of[kStages];
  __shared__ State warp_states[kStages][kTeamWarps];
  __shared__ State row_states[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(&full[s], 1);
      init_barrier(&summed[s], Chunk::kThreads);
      init_barrier(&complete[s], 2 * 32);  // of two warps, each lane for itself: it has read what the stage holds
      init_barrier(&empty[s], Chunk::kThreads);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const Mem mem{operands};
  const unsigned last_job = static_cast<unsigned>(operands.rows) * kChunks - 1;
  const auto with_chunk = [&](unsigned job, int stage, auto body) {
    const unsigned index = job / kChunks;
    const Row row(index);
    body(Chunk{mem, row, static_cast<int>(job - index * kChunks), shared + stage * kChunkPacks});
  };
  const auto words_of = [&](unsigned row) {
    return WordsInMemory<State>{operands.words + static_cast<int64_t>(row) * kChunks * kWords};
  };
  RingPosition<kStages> at;

  if (warp < kSumWarps) {
    for (;; at.next()) {
      if (at.count % kSummers != warp / kTeamWarps) continue;
      wait(&full[at.stage], at.parity);
      const unsigned job = job_of[at.stage];
      if (job == kEnd) return;
      with_chunk(job, at.stage, [&](const Chunk& chunk) {
        const State state = chunk.warp_state();
        if (lane == 0) warp_states[at.stage][warp % kTeamWarps] = state;
      });
      arrive(&summed[at.stage]);  // each lane for itself: it may have written to the stage
    }
  }
  if (warp < kTeamsWarps) {
    for (;; at.next()) {
      if (at.count % kWriters != (warp - kSumWarps) / kTeamWarps) continue;
      wait(&complete[at.stage], at.parity);
      const unsigned job = job_of[at.stage];
      if (job == kEnd) return;
      with_chunk(job, at.stage, [&](const Chunk& chunk) {
        if (chunk.number == 0 && chunk.rank == 0) {
          mem.store_row(job / kChunks, row_states[at.stage], mem.label_element(chunk.row.begin));
        }
        chunk.finish(row_states[at.stage], warp_states[at.stage][warp % kTeamWarps].pivot);
      });
      // What was read and written here comes before the next copy, which takes another way to shared memory.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      arrive(&empty[at.stage]);
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
    int taken_of_row = 0;  // chunks taken of the latest row
    RingPosition<kStages>
        oldest;  // that may still be on its way: more at once would only keep one another and the results waiting
    while (2 * ticket <= last_job) {
      const unsigned begin = 2 * ticket, end = min(begin + 1, last_job);
      for (unsigned job = begin; job <= end; ++job) {
        if (job / kChunks != row) taken_of_row = 0;
        row = job / kChunks;
        ++taken_of_row;
      }
      const bool ahead = taken_of_row + 2 <= kStages;
      unsigned next = 0;
      for (unsigned job = begin; job <= end; ++job) {
        if (at.count >= kStages) wait(&empty[at.stage], at.parity ^ 1);
        if (at.count >= kCopies) {
          wait(&full[oldest.stage], oldest.parity);
          oldest.next();
        }
        job_of[at.stage] = job;
        with_chunk(job, at.stage, [&](const Chunk& chunk) {
          int bytes = 0;
          chunk.for_runs([&](int, int packs, const typename Row::At&) { bytes += packs * kPackBytes * Mem::kInputs; });
          arrive_and_expect(&full[at.stage], bytes);
          chunk.for_runs([&](int j, int packs, const typename Row::At& place) {
#pragma unroll
            for (int k = 0; k < Mem::kInputs; ++k) {
              copy_bulk(chunk.held(k, j), mem.in(k) + place.place.element, packs * kPackBytes, &full[at.stage]);
            }
          });
        });
        at.next();
        if (job == begin && ahead) next = next_ticket();
      }
      if (!ahead) {
        for (RingPosition<kStages> free = at; free.count < at.count + 2; free.next()) {
          if (free.count >= kStages) wait(&empty[free.stage], free.parity ^ 1);
        }
        next = next_ticket();
      }
      ticket = next;
    }
    for (int i = 0; i < kEnds; ++i, at.next()) {  // one for each team
      if (at.count >= kStages) wait(&empty[at.stage], at.parity ^ 1);
      job_of[at.stage] = kEnd;
      arrive(&full[at.stage]);
    }
    return;
  }
  if (warp == kPlan.publishing_warp()) {
    for (int ends = 0;; at.next()) {
      wait(&full[at.stage], at.parity);
      const unsigned job = job_of[at.stage];
      if (job != kEnd) {
        wait(&summed[at.stage], at.parity);
        const State state = combine_over_lanes<Op, kTeamWarps>(warp_states[at.stage][lane % kTeamWarps]);
        if (lane == 0) words_of(job / kChunks).publish(static_cast<int>(job % kChunks), state);
      }
      arrive(&complete[at.stage]);
      if (job == kEnd && ++ends == kWriters) return;  // each team of writers has been told
    }
  }
  State state = identity<Op, typename Mem::M>();
  unsigned row = kEnd;
  for (int ends = 0;; at.next()) {
    if (at.count % kWaiters != warp - kPlan.first_waiter()) continue;
    wait(&full[at.stage], at.parity);
    const unsigned job = job_of[at.stage];
    if (job != kEnd) {
      wait(&summed[at.stage], at.parity);
      if (job / kChunks != row) {
        row = job / kChunks;
        state = await_row<Op, static_cast<int>(kChunks), 2>(words_of(row));
      }
      if (lane == 0) row_states[at.stage] = state;
    }
    arrive(&complete[at.stage]);
    if (job == kEnd && ++ends == kWriters / kWaiters) return;  // each team of writers has been told
  }
#endif
}

}  // namespace jax_softmax::device
