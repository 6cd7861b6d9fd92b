#include <algorithm>

#include "plan/plan.h"

namespace jax_softmax {

namespace {

struct LanesAndPacks {
  int lanes, packs;
};
// The lanes that share a row and the packs of each: the first with room for the row. Where rows have no edges (packs
// with elements of other rows), several packs a lane keep enough loads in flight although some lanes have none.
constexpr LanesAndPacks kSpread[] = {{1, 1},  {2, 1},  {4, 1},  {4, 2},  {4, 3},  {8, 2},  {8, 3}, {16, 2},
                                     {16, 3}, {32, 2}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
// Where they have, several packs a lane share the cost of a look at them.
constexpr LanesAndPacks kSharing[] = {{1, 1},  {2, 1},  {4, 1},  {4, 2},  {8, 2},  {8, 3},  {16, 2}, {16, 3},
                                      {32, 2}, {16, 5}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
// The most packs that a warp, and a block, hold in registers without a spill.
constexpr int kWarpPacks = 8 * 32;
constexpr int kBlockPacks = 4 * 256;
constexpr int kLongBlockPacks = 8 * 256;  // where there are no edges and no mask
// Of a block of several rows, the most threads; and the most packs of all operands, unless the block is one warp.
constexpr int kLanesThreads = 128;
constexpr int kLanesBlockPacks = 256;
// The most packs of all operands that a lane has of a row of several runs. So many, since then few lanes have a row,
// and a warp has neighbouring rows, whose runs are side by side.
constexpr int kGatheredPacks = 8;

Registers in_lanes(const Problem& problem, int boundary, const Runs& runs) {
  Registers plan{};
  plan.boundary = boundary;
  if (runs.runs == 1) {
    const LanesAndPacks* choice = runs.aligned() ? kSpread : kSharing;
    if (problem.masked) choice = kSpread;
    while (choice->lanes * choice->packs < runs.packs) ++choice;
    plan.lanes = choice->lanes;
    plan.packs = choice->packs;
  } else {
    plan.lanes = 1;
    while (plan.lanes < 32 && ceil_div(runs.packs, plan.lanes) * problem.cost.inputs > kGatheredPacks) {
      plan.lanes *= 2;
    }
    plan.packs = static_cast<int>(ceil_div(runs.packs, plan.lanes));
  }
  // Rows without results of elements take little time: more rows a warp keep enough loads in flight.
  if (!problem.cost.element_results && problem.cost.inputs == 1 && plan.packs <= 2 && plan.lanes > 2) {
    plan.lanes /= 2;
    plan.packs *= 2;
  }
  plan.threads = kLanesThreads;
  while (plan.threads > 32 && plan.threads * plan.packs * problem.cost.inputs > kLanesBlockPacks) plan.threads /= 2;
  return plan;
}

}  // namespace

std::optional<Registers> plan_registers(const Problem& problem, const Device& device) {
  if (!problem.view.minor_reduced) return {};
  const View& view = problem.view;
  const Footprint& footprint = problem.footprint;
  const int of_packs = boundary_of(view, kPackBytes, footprint);
  const Runs short_runs = runs_of(view, of_packs, footprint);
  if (short_runs.packs <= kWarpPacks) return in_lanes(problem, of_packs, short_runs);

  // The packs of long rows begin with a cache line: warps that share no cache line are faster.
  const int boundary = boundary_of(view, kCacheLineBytes, footprint);
  const Runs runs = runs_of(view, boundary, footprint);
  const bool no_edges = runs.aligned() && !problem.masked && problem.identity_load,
             clusters = device.largest_cluster > 1;
  // 8 packs of 16-bit elements, with a check of whether the row has each of them, take many registers: shared memory is
  // better where there is much of it.
  const bool lengthens = no_edges && (problem.footprint.in_bytes > 2 || runs.packs % (8 * 32) == 0 || !clusters);
  if (runs.packs > (lengthens ? kLongBlockPacks : kBlockPacks)) return {};
  Registers plan{};
  plan.boundary = boundary;
  plan.packs = runs.packs <= 4 * 256 ? 4 : 8;
  plan.threads = static_cast<int>(round_up(ceil_div(runs.packs, plan.packs), 32));
  plan.lanes = plan.threads;
  return plan;
}

}  // namespace jax_softmax
