// The schedule for rows of many chunks, and many of them: a block to a multiprocessor, each with a ring of stages in
// shared memory that chunks pass through.
#pragma once

#include "cuda/barrier.cuh"
#include "cuda/chunk.cuh"

namespace jax_softmax::cuda {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copy_bulk(Pack* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
#endif

// The place in a block's ring: a stage, and the parity of the rounds.
struct Turn {
  int number = 0;
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void next(int stages) {
    ++number;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// As many blocks as run at once take the chunks of all rows in their order, by ticket, and each chunk passes through
// a ring of stages in shared memory from one group of warps to the next, by barriers that say:
//
//   one thread            takes a ticket and has its two chunks copied           full
//   teams of warps        sum the terms                                          summed
//   one warp              publishes the chunks' states                           complete
//   one or two warps      wait for those of the whole row                        complete
//   teams of warps        write the results                                      empty
//
// So copies are under way all the time, an exchange that takes its while keeps nobody from working, and a
// multiprocessor that is slower than others takes fewer chunks. A chunk with a stage is published without waiting for
// anybody; so all progress as long as all rings together hold a row, and the blocks all run (a cooperative launch). Of
// a row that they do not hold, some chunks are summed first, without staying, and read again at the end.
template <class A, Edges kEdges>
__global__ void __launch_bounds__(ring_threads(A::kInputs, kEdges) + 32, 1)
    rows_in_ring(const __grid_constant__ ChunkArgs<A> args) {
#if __CUDA_ARCH__ >= 900
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using Work = Chunk<A, kEdges>;
  constexpr int kWords = kStateWords<C>;
  constexpr int kTeamWarps = Work::kWarps;
  constexpr unsigned kEnd = ~0u;
  constexpr int kEnds = kRingSummers > kRingWriters ? kRingSummers : kRingWriters;
  constexpr int kSumWarps = kRingSummers * kTeamWarps, kTeamsWarps = kSumWarps + kRingWriters * kTeamWarps;
  extern __shared__ __align__(128) Pack shared[];
  __shared__ uint64_t full[kMostStages], summed[kMostStages], complete[kMostStages], empty[kMostStages];
  __shared__ unsigned ticket_of[kMostStages];
  __shared__ State<C> part[kMostStages][kTeamWarps];
  __shared__ State<C> finished[kMostStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < args.stages; ++s) {
      init_barrier(&full[s], 1);
      init_barrier(&summed[s], Work::kThreads);
      init_barrier(&complete[s], 2 * 32);  // of two warps, each lane for itself: it has read what the stage holds
      init_barrier(&empty[s], Work::kThreads);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const unsigned chunks = args.chunks;
  // What passes through the rings: of each row the chunks that do not stay, those that do, and again those that do not.
  const unsigned last_item = static_cast<unsigned>(args.rows.rows) * args.items.divisor - 1;
  const auto row_of = [&](unsigned item) { return args.items.divide(item); };
  const auto in_row = [&](unsigned item) { return item - row_of(item) * args.items.divisor; };
  const auto summed_alone = [&](unsigned item) { return in_row(item) < static_cast<unsigned>(args.again); };
  const auto work_on = [&](unsigned item, int stage) {
    const unsigned chunk = in_row(item);
    return Work(args, row_of(item), chunk < chunks ? chunk : chunk - chunks,
                shared + stage * (args.share + args.spare) * A::kInputs);
  };
  const auto words_of = [&](unsigned row) {
    return WordsInMemory<C>{args.words + static_cast<int64_t>(row) * chunks * kWords};
  };
  Turn turn;

  if (warp < kSumWarps) {
    for (;; turn.next(args.stages)) {
      if (turn.number % kRingSummers != warp / kTeamWarps) continue;
      wait(&full[turn.stage], turn.parity);
      const unsigned item = ticket_of[turn.stage];
      if (item == kEnd) return;
      const State<C> state = work_on(item, turn.stage).warp_state();
      if (lane == 0) part[turn.stage][warp % kTeamWarps] = state;
      arrive(&summed[turn.stage]);  // each lane for itself: it may have written to the stage
    }
  }
  if (warp < kTeamsWarps) {
    for (;; turn.next(args.stages)) {
      if (turn.number % kRingWriters != (warp - kSumWarps) / kTeamWarps) continue;
      wait(&complete[turn.stage], turn.parity);
      const unsigned item = ticket_of[turn.stage];
      if (item == kEnd) return;
      if (!summed_alone(item)) {
        work_on(item, turn.stage).finish(finished[turn.stage], part[turn.stage][warp % kTeamWarps].pivot);
      }
      // What was read and written here comes before the next copy, which takes another way to shared memory.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      arrive(&empty[turn.stage]);
    }
  }
  if (warp == kTeamsWarps) {
    if (lane != 0) return;
    // A ticket is asked for ahead of time, since the answer takes its while, but not if all stages could then hold
    // chunks that stay, of the row that a chunk without a stage belongs to: none of them would ever be empty again.
    unsigned* const counter = reinterpret_cast<unsigned*>(args.words + args.rows.rows * chunks * kWords);
    const auto next_ticket = [&] { return gridDim.x + atomicAdd(counter, 1u); };
    unsigned ticket = blockIdx.x;
    unsigned row = kEnd;
    int of_row = 0;  // chunks taken of the latest row, of those that stay
    Turn oldest;     // that may still be on its way: more at once would only keep one another and the results waiting
    while (2 * ticket <= last_item) {
      const unsigned begin = 2 * ticket, end = min(begin + 1, last_item);
      for (unsigned item = begin; item <= end; ++item) {
        if (row_of(item) != row) of_row = 0;
        row = row_of(item);
        if (!summed_alone(item) && in_row(item) < chunks) ++of_row;
      }
      const bool ahead = of_row + 2 <= args.stages;
      unsigned next = 0;
      for (unsigned item = begin; item <= end; ++item) {
        if (turn.number >= args.stages) wait(&empty[turn.stage], turn.parity ^ 1);
        if (turn.number >= kRingCopies) {
          wait(&full[oldest.stage], oldest.parity);
          oldest.next(args.stages);
        }
        ticket_of[turn.stage] = item;
        const Work work = work_on(item, turn.stage);
        work.copy_beyond([](int) { return true; });
        const auto copied = work.copied_lines(args);
        const int bytes = max(copied.end - copied.begin, 0) * kPackBytes;
        const int first = Op::kFirstSummed > 0 && summed_alone(item) ? Op::kFirstSummed : 0;
        arrive_and_expect(&full[turn.stage], bytes * (A::kInputs - first));
        if (bytes > 0) {
#pragma unroll
          for (int k = 0; k < A::kInputs; ++k) {
            if (k < first) continue;
            copy_bulk(work.at(k, copied.begin),
                      args.rows.access.in[k] + work.row.element + work.first + copied.begin * A::kWidth, bytes,
                      &full[turn.stage]);
          }
        }
        turn.next(args.stages);
        if (item == begin && ahead) next = next_ticket();
      }
      if (!ahead) {
        for (Turn free = turn; free.number < turn.number + 2; free.next(args.stages)) {
          if (free.number >= args.stages) wait(&empty[free.stage], free.parity ^ 1);
        }
        next = next_ticket();
      }
      ticket = next;
    }
    for (int i = 0; i < kEnds; ++i, turn.next(args.stages)) {  // one for each team
      if (turn.number >= args.stages) wait(&empty[turn.stage], turn.parity ^ 1);
      ticket_of[turn.stage] = kEnd;
      arrive(&full[turn.stage]);
    }
    return;
  }
  if (warp == kTeamsWarps + 1) {
    for (int ends = 0;; turn.next(args.stages)) {
      wait(&full[turn.stage], turn.parity);
      const unsigned item = ticket_of[turn.stage];
      if (item != kEnd) {
        wait(&summed[turn.stage], turn.parity);
        const State<C> state = combine_over_lanes<Op, M, kTeamWarps>(part[turn.stage][lane % kTeamWarps]);
        if (lane == 0 && in_row(item) < chunks) words_of(row_of(item)).publish(in_row(item), state);
      }
      arrive(&complete[turn.stage]);
      if (item == kEnd && ++ends == kRingWriters) return;  // each team of writers has been told
    }
  }
  const int waiting = blockDim.x / 32 - kTeamsWarps - 2;  // warps
  State<C> state = identity<Op, M>();
  unsigned row = kEnd;
  for (int ends = 0;; turn.next(args.stages)) {
    if (turn.number % waiting != warp - kTeamsWarps - 2) continue;
    wait(&full[turn.stage], turn.parity);
    const unsigned item = ticket_of[turn.stage];
    if (item != kEnd && !summed_alone(item)) {
      wait(&summed[turn.stage], turn.parity);
      if (row_of(item) != row) {
        row = row_of(item);
        state = await_row<Op, M, 2>(words_of(row), args.chunks);
      }
      if (lane == 0) finished[turn.stage] = state;
    }
    arrive(&complete[turn.stage]);
    if (item == kEnd && ++ends == kRingWriters / waiting) return;  // each team of writers has been told
  }
#endif
}

}  // namespace jax_softmax::cuda
