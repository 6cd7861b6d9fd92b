// The schedule `ring`, for rows of many chunks, and many of them: a block to a multiprocessor, each with a ring of
// stages in shared memory that chunks pass through.
//
// The blocks take the chunks of all rows in their order, by ticket. In a block these work on each chunk, one after the
// other; each arrives at a barrier of the chunk's stage when it is done:
//
//   works                                                    barrier
//   one thread: takes a ticket and begins the copies         full
//   a team of summers: sums the terms                        summed
//   one warp: publishes the chunk's state                    complete
//   one or two warps: wait for the states of the whole row   complete
//   a team of writers: writes the results                    empty
//
// So copies are always in flight, no warp but one waits for other blocks, and a slow multiprocessor takes fewer chunks.
// A chunk that has a stage is published without waiting for other blocks. So there is no deadlock as long as all rings
// together hold a row, and all blocks run (a cooperative launch).
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

// Where a warp is in its block's ring.
template <int kStages>
struct RingPosition {
  int count = 0;        // chunks that the warp has passed
  int stage = 0;        // count % kStages
  unsigned parity = 0;  // count / kStages % 2: the parity of the phase to wait for at the stage's barriers
  __device__ __forceinline__ void next() {
    ++count;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// What the warps of a block do. Job r * kChunks + c is chunk c of row r. Ticket t is for the kTicket jobs from t *
// kTicket on.
template <class Mem, class Plan>
struct RingOfBlock {
  using Op = typename Mem::Op;
  using State = StateOf<Op>;
  using Row = RowPacks<Mem, Plan>;
  using Chunk = ChunkOfThread<Mem, Plan>;
  static constexpr Ring kPlan = Plan::kPlan;
  static constexpr int kStages = kPlan.stages, kTeamWarps = Chunk::kWarps, kWords = kStateWords<State>;
  static constexpr unsigned kChunks = kPlan.chunks, kTicket = kPlan.ticket;
  static constexpr unsigned kEnd = ~0u;  // stands for a job where there are no more
  using Position = RingPosition<kStages>;

  struct Shared {
    uint64_t full[kStages], summed[kStages], complete[kStages], empty[kStages];  // barriers
    unsigned job[kStages];
    State warp_states[kStages][kTeamWarps];  // of a chunk's warps
    State row_states[kStages];               // of the chunk's row
  };

  const Mem& mem;
  Shared& shared;
  Pack* const packs;  // of the stages

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(&shared.full[s], 1);
      init_barrier(&shared.summed[s], Chunk::kThreads);
      init_barrier(&shared.complete[s], 2 * 32);  // each lane of two warps, when it has read what the stage holds
      init_barrier(&shared.empty[s], Chunk::kThreads);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Calls body(chunk), where the chunk is that of `job`, in that stage.
  template <class Body>
  __device__ __forceinline__ void with_chunk(unsigned job, int stage, Body body) const {
    const unsigned index = job / kChunks;
    const Row row(index);
    constexpr int kChunkPacks = packs_of_chunk(kPlan, Plan::kFootprint);
    body(Chunk{mem, row, static_cast<int>(job - index * kChunks), packs + stage * kChunkPacks});
  }
  // Memory for the states of a row's chunks.
  __device__ __forceinline__ WordsInMemory<State> words_of(unsigned row) const {
    return {mem.operands.scratch + static_cast<int64_t>(row) * kChunks * kWords};
  }

  // A team of the warps that sum terms.
  __device__ __forceinline__ void sum(int team) const {
    for (Position position;; position.next()) {
      if (position.count % kPlan.summers != team) continue;
      wait(&shared.full[position.stage], position.parity);
      const unsigned job = shared.job[position.stage];
      if (job == kEnd) return;
      with_chunk(job, position.stage, [&](const Chunk& chunk) {
        const State state = chunk.warp_state();
        if (lane() == 0) shared.warp_states[position.stage][warp() % kTeamWarps] = state;
      });
      arrive(&shared.summed[position.stage]);  // each lane, since each may have written to the stage
    }
  }
  // A team of the warps that write results.
  __device__ __forceinline__ void write(int team) const {
    for (Position position;; position.next()) {
      if (position.count % kPlan.writers != team) continue;
      wait(&shared.complete[position.stage], position.parity);
      const unsigned job = shared.job[position.stage];
      if (job == kEnd) return;
      with_chunk(job, position.stage, [&](const Chunk& chunk) {
        if (chunk.number == 0 && chunk.rank == 0) {
          mem.store_row(job / kChunks, shared.row_states[position.stage], mem.label_element(chunk.row.begin));
        }
        chunk.finish(shared.row_states[position.stage], shared.warp_states[position.stage][warp() % kTeamWarps].pivot);
      });
      // Orders these reads and writes of the stage before the next copy to it, which is not made by a thread.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      arrive(&shared.empty[position.stage]);
    }
  }

  // The thread that takes tickets and begins copies. It takes the next ticket early, since that takes long; but not if
  // the jobs of the latest row, the ticket's included, may be more than the stages: a job of that row without a stage
  // would be waited for by all stages, and none would become empty.
  __device__ __forceinline__ void copy() const {
    const unsigned last_job = static_cast<unsigned>(mem.operands.rows) * kChunks - 1;
    unsigned* const counter = reinterpret_cast<unsigned*>(mem.operands.scratch + mem.operands.rows * kChunks * kWords);
    const auto next_ticket = [&] { return gridDim.x + atomicAdd(counter, 1u); };
    unsigned ticket = blockIdx.x;
    unsigned row = kEnd;
    int jobs_of_row = 0;  // that this block has taken of the latest row
    Position position;
    Position oldest;  // of the copies in flight: more than kPlan.copies would only delay each other
    while (ticket * kTicket <= last_job) {
      const unsigned begin = ticket * kTicket, end = min(begin + kTicket - 1, last_job);
      for (unsigned job = begin; job <= end; ++job) {
        if (job / kChunks != row) jobs_of_row = 0;
        row = job / kChunks;
        ++jobs_of_row;
      }
      const bool ahead = jobs_of_row + static_cast<int>(kTicket) <= kStages;
      unsigned next = 0;
      for (unsigned job = begin; job <= end; ++job) {
        wait_until_empty(position);
        if (position.count >= kPlan.copies) {
          wait(&shared.full[oldest.stage], oldest.parity);
          oldest.next();
        }
        start_copy(job, position);
        position.next();
        if (job == begin && ahead) next = next_ticket();
      }
      if (!ahead) {
        for (Position free = position; free.count < position.count + static_cast<int>(kTicket); free.next())
          wait_until_empty(free);
        next = next_ticket();
      }
      ticket = next;
    }
    constexpr int kEnds = kPlan.summers > kPlan.writers ? kPlan.summers : kPlan.writers;
    for (int i = 0; i < kEnds; ++i, position.next()) {  // tells each team
      wait_until_empty(position);
      shared.job[position.stage] = kEnd;
      arrive(&shared.full[position.stage]);
    }
  }
  __device__ __forceinline__ void wait_until_empty(const Position& position) const {
    if (position.count >= kStages) wait(&shared.empty[position.stage], position.parity ^ 1);
  }
  __device__ __forceinline__ void start_copy(unsigned job, const Position& position) const {
    shared.job[position.stage] = job;
    uint64_t* const full = &shared.full[position.stage];
    with_chunk(job, position.stage, [&](const Chunk& chunk) {
      int bytes = 0;
      chunk.for_runs([&](int, int n, const typename Row::PackLocation&) { bytes += n * kPackBytes * Mem::kInputs; });
      arrive_and_expect(full, bytes);
      chunk.for_runs([&](int j, int n, const typename Row::PackLocation& from) {
#pragma unroll
        for (int k = 0; k < Mem::kInputs; ++k) {
          copy_bulk(chunk.held(k, j), mem.in(k) + from.offsets.element, n * kPackBytes, full);
        }
      });
    });
  }

  // The warp that publishes the states of chunks.
  __device__ __forceinline__ void publish() const {
    int ends = 0;  // how many kEnd this warp has passed on: one for each team of writers
    for (Position position; ends < kPlan.writers; position.next()) {
      wait(&shared.full[position.stage], position.parity);
      const unsigned job = shared.job[position.stage];
      if (job != kEnd) {
        wait(&shared.summed[position.stage], position.parity);
        const State state = combine_over_lanes<Op, kTeamWarps>(shared.warp_states[position.stage][lane() % kTeamWarps]);
        if (lane() == 0) words_of(job / kChunks).publish(static_cast<int>(job % kChunks), state);
      }
      arrive(&shared.complete[position.stage]);
      if (job == kEnd) ++ends;
    }
  }
  // One of the warps that wait for the states of all chunks of a row.
  __device__ __forceinline__ void await_rows(int waiter) const {
    State state = identity<Op, typename Mem::M>();
    unsigned row = kEnd;
    int ends = 0;  // as in `publish`, of this warp's stages
    for (Position position; ends < kPlan.writers / kPlan.waiters; position.next()) {
      if (position.count % kPlan.waiters != waiter) continue;
      wait(&shared.full[position.stage], position.parity);
      const unsigned job = shared.job[position.stage];
      if (job != kEnd) {
        wait(&shared.summed[position.stage], position.parity);
        if (job / kChunks != row) {
          row = job / kChunks;
          state = await_row<Op, static_cast<int>(kChunks), 2>(words_of(row));
        }
        if (lane() == 0) shared.row_states[position.stage] = state;
      }
      arrive(&shared.complete[position.stage]);
      if (job == kEnd) ++ends;
    }
  }
};
#endif

template <class Mem, class Plan>
__device__ __forceinline__ void ring(const typename Mem::Operands& operands) {
#if __CUDA_ARCH__ >= 900
  using Block = RingOfBlock<Mem, Plan>;
  constexpr Ring kPlan = Plan::kPlan;
  extern __shared__ __align__(128) Pack packs[];
  __shared__ typename Block::Shared shared;
  const Mem mem{operands};
  const Block block{mem, shared, packs};
  if (threadIdx.x == 0) block.init_barriers();
  __syncthreads();
  const int warp = Block::warp();
  if (warp < kPlan.summing_warps()) {
    block.sum(warp / Block::kTeamWarps);
  } else if (warp < kPlan.copying_warp()) {
    block.write((warp - kPlan.summing_warps()) / Block::kTeamWarps);
  } else if (warp == kPlan.copying_warp()) {
    if (Block::lane() == 0) block.copy();
  } else if (warp == kPlan.publishing_warp()) {
    block.publish();
  } else {
    block.await_rows(warp - kPlan.first_waiter());
  }
#endif
}

}  // namespace jax_softmax::device
