#include <algorithm>

#include "plan/plan.h"

namespace jax_softmax {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kPieceBytes = 64 << 10;  // of all operands
constexpr int kMostPieces = 512;           // of a row
constexpr int kFinished = 2;               // packs that a thread computes results of

}  // namespace

std::optional<Twice> plan_twice(const Problem& problem) {
  if (!problem.view.minor_reduced) return {};
  const Footprint& footprint = problem.footprint;
  Twice plan{};
  plan.boundary = boundary_of(problem.view, kPackBytes, footprint);
  const Runs runs = runs_of(problem.view, plan.boundary, footprint);
  if (runs.packs >= int64_t{1} << 31) return {};
  plan.share = std::max(ceil_div(runs.packs, kMostPieces), kPieceBytes / kPackBytes / problem.cost.inputs);
  plan.pieces = static_cast<int>(ceil_div(runs.packs, plan.share));
  plan.share = ceil_div(runs.packs, plan.pieces);
  plan.finished = kFinished;
  plan.threads = kThreads;
  return plan;
}

}  // namespace jax_softmax
