// How long rows are cut into chunks, the same for the schedules `chunks` and `ring`.
#pragma once

#include "plan/plan.h"

namespace jax_softmax {

inline constexpr int kMostTeams = 4;                // in a block of the chunks schedule
inline constexpr int kMostBlocks = 16;              // in a cluster
inline constexpr int kFewChunks = 8;                // for each multiprocessor, in all rows: few
inline constexpr int kSharedBytesBeside = 3 << 10;  // static shared memory of both schedules, rounded up

struct Cut {
  int64_t chunks;    // of a row
  int64_t share;     // packs of each operand in one
  int team_threads;  // that have one
  int boundary;
  int64_t bytes;  // of all operands in a chunk
};

// Nothing if a row has too many.
std::optional<Cut> cut(const Problem& problem, const Device& device);
// Whether a ring on the device holds a row.
bool fits_ring(const Cut& cut, const Problem& problem, const Device& device);

Launch launch_of(const Chunks& plan, const Problem& problem);

}  // namespace jax_softmax
