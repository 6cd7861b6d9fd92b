#include <algorithm>

#include "plan/chunks.h"

namespace jax_softmax {

namespace {

constexpr int kMostStages = 16;
constexpr int kSummers = 3;  // teams that sum terms
constexpr int kWriters = 2;  // teams that write results
constexpr int kCopies = 4;   // chunks that are copied at once
// A warp that waits for a stage must know that what was there before has been copied: it has waited for that itself, or
// for something that was copied no sooner than kCopies later.
constexpr int kFewestStages = 6;
static_assert(kFewestStages % kSummers == 0 && kFewestStages + 1 >= kSummers + kCopies);
// Rows of more chunks are waited for by two warps, in turns: of an even number of stages, so that the same one waits
// for all that passes through a stage.
constexpr int kLongRow = 64;

int64_t stages_of(const Cut& cut, const Device& device) {
  const int64_t shared = device.shared_memory_per_block - kSharedBytesBeside;
  const int64_t stages = std::min<int64_t>(kMostStages, shared / cut.bytes);
  return cut.chunks > kLongRow ? stages - stages % 2 : stages;
}

}  // namespace

bool fits_ring(const Cut& cut, const Problem& problem, const Device& device) {
  const int64_t stages = stages_of(cut, device);
  // Rings that held no more than a row and a third would wait for one another.
  return problem.packs && device.compute_capability >= 90 && stages >= kFewestStages &&
         cut.chunks <= stages * device.multiprocessors * 3 / 4 && problem.view.rows * cut.chunks < (1ll << 31);
}

std::optional<Ring> plan_ring(const Problem& problem, const Device& device) {
  const std::optional<Cut> cut = jax_softmax::cut(problem, device);
  if (!cut || !fits_ring(*cut, problem, device)) return {};
  Ring plan{};
  plan.chunks = static_cast<int>(cut->chunks);
  plan.share = static_cast<int>(cut->share);
  plan.team_threads = cut->team_threads;
  plan.stages = static_cast<int>(stages_of(*cut, device));
  plan.summers = kSummers;
  plan.writers = kWriters;
  plan.waiters = cut->chunks > kLongRow ? 2 : 1;
  plan.copies = kCopies;
  // Two chunks are taken at once, with half the atomics; of few in all one, so that more multiprocessors have some.
  plan.ticket = problem.view.rows * cut->chunks <= int64_t{kFewChunks} * device.multiprocessors ? 1 : 2;
  plan.boundary = cut->boundary;
  return plan;
}

}  // namespace jax_softmax
