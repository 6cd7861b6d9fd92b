// The schedules `chunks` and `ring`: a row is cut into chunks, each in the shared memory of a block.
#pragma once

#include "geometry/rows.h"

namespace jax_softmax {

// A row in the shared memory of blocks, chunk by chunk.
struct Chunks {
  int chunks;        // of a row
  int share;         // packs of each operand in a chunk
  int team_threads;  // threads that hold a chunk
  int teams;         // of a block
  int cluster;       // blocks of the cluster that holds a row
  int boundary;      // as of Registers

  template <class F>
  constexpr void each(F f) const {
    f("chunks", chunks), f("share", share), f("team_threads", team_threads), f("teams", teams), f("cluster", cluster);
    f("boundary", boundary);
  }
  constexpr int threads() const { return teams * team_threads; }
};

// The same chunks, passing through rings in the shared memory of blocks that stay.
struct Ring {
  int chunks;            // of a row
  int share;             // packs of each operand in a chunk
  int team_threads;      // threads that sum or write a chunk
  int stages;            // of a block's ring: buffers for one chunk each
  int summers, writers;  // teams that sum terms, and that write results
  int waiters;           // warps that wait for the states of whole rows
  int copies;            // chunks whose copies are in flight together
  int ticket;            // chunks that a block takes at a time
  int boundary;          // as of Registers

  template <class F>
  constexpr void each(F f) const {
    f("chunks", chunks), f("share", share), f("team_threads", team_threads), f("stages", stages);
    f("summers", summers), f("writers", writers), f("waiters", waiters), f("copies", copies), f("ticket", ticket);
    f("boundary", boundary);
  }
  // Warps, in this order: teams that sum, teams that write, one that copies, one that publishes, and those that wait.
  constexpr int summing_warps() const { return summers * team_threads / 32; }
  constexpr int copying_warp() const { return summing_warps() + writers * team_threads / 32; }
  constexpr int publishing_warp() const { return copying_warp() + 1; }
  constexpr int first_waiter() const { return publishing_warp() + 1; }
  constexpr int threads() const { return 32 * (first_waiter() + waiters); }
};

// Packs of a chunk in shared memory, of all operands.
template <class Plan>
constexpr int64_t packs_of_chunk(const Plan& plan, const Footprint& footprint) {
  return static_cast<int64_t>(plan.share) * footprint.inputs;
}
constexpr int64_t shared_bytes_of(const Chunks& plan, const Footprint& footprint) {
  return plan.teams * packs_of_chunk(plan, footprint) * kPackBytes;
}
constexpr int64_t shared_bytes_of(const Ring& plan, const Footprint& footprint) {
  return plan.stages * packs_of_chunk(plan, footprint) * kPackBytes;
}

// Words of 8 bytes for the states of all chunks of `rows` rows; the ticket counter is the word after them.
constexpr int64_t words_of(const Ring& plan, int64_t rows, const Footprint& footprint) {
  return rows * plan.chunks * (footprint.state_bytes / 8);
}

}  // namespace jax_softmax
