// The schedules `chunks` and `ring`, and how both cut long rows into chunks.
#include <algorithm>

#include "plan/plan.h"

namespace jax_softmax {

namespace {

constexpr int kMostTeams = 4;                // in a block of the chunks schedule
constexpr int kMostBlocks = 16;              // in a cluster
constexpr int kFewChunks = 8;                // of all rows, for each multiprocessor: few
constexpr int kSharedBytesBeside = 3 << 10;  // static shared memory of both schedules, rounded up
constexpr int kMostChunks = 8192;            // of a row
// Where there are fewer chunks than multiprocessors, a block has one chunk, if a cluster of this size holds the row.
constexpr int kSmallCluster = 8;
// Chunks of a row of one operand up to which larger chunks are worth the cost of edges.
constexpr int kManyChunks = 64;

struct Cut {
  int64_t chunks;    // of a row
  int64_t share;     // packs of each operand in a chunk
  int team_threads;  // threads that have a chunk
  int boundary;      // as of Registers
  int64_t bytes;     // of all operands in a chunk
};

// A team's threads, the packs of each operand that a thread has, and so the packs of each operand in a full chunk: 16
// KB of all operands. Rows may have edges: packs with masked elements or with elements of other rows. A thread looks at
// edges once for all operands. So where there are edges, two operands have half as many threads of twice as many packs,
// and a full chunk has 18 KB; but it takes longer.
constexpr int team_threads(int inputs, bool edges) { return edges ? 128 / inputs : 128; }
constexpr int thread_packs(int inputs, bool edges) { return edges ? 9 : 8 / inputs; }
constexpr int room(int inputs, bool edges) { return team_threads(inputs, edges) * thread_packs(inputs, edges); }

// Registers of a thread, so that a multiprocessor has room for three blocks of three teams, or four of two operands.
int registers_of(const Problem& problem, bool edges) {
  if (problem.view.reduced.size > 1 && edges) return 80;  // locations of packs in many runs
  if (!problem.identity_load) return 112;                 // values of packs, that an expression makes, instead of words
  return problem.cost.inputs == 1 ? 56 : edges ? 80 : 40;
}

// Nothing if a row has too many.
std::optional<Cut> cut_of(const Problem& problem, const Device& device) {
  if (!problem.view.minor_reduced) return {};
  const Footprint& footprint = problem.footprint;
  const int boundary = boundary_of(problem.view, kCacheLineBytes, footprint);
  const Runs runs = runs_of(problem.view, boundary, footprint);
  const int inputs = problem.cost.inputs;
  const bool clusters = device.largest_cluster > 1;
  bool edges = !runs.aligned() || problem.masked || !problem.identity_load;
  const int64_t chunks = ceil_div(runs.packs, room(inputs, false)),
                with_more = ceil_div(runs.packs, room(inputs, true));
  // Larger chunks, at the cost of edges, are worth it if they are fewer, and not many; but not if full chunks without
  // edges fit a cluster.
  const bool full = clusters && chunks <= kMostBlocks && runs.packs % room(inputs, false) == 0;
  edges = edges || (with_more < chunks && !full && with_more <= (inputs == 1 ? kManyChunks : kMostTeams));
  // Equal chunks of whole cache lines; of two operands in a cluster, as many as its blocks have teams.
  int64_t n = ceil_div(runs.packs, room(inputs, edges));
  if (inputs == 2 && n > kMostTeams) n = round_up(n, kMostTeams);
  Cut cut{};
  cut.share = round_up(ceil_div(runs.packs, n), kCacheLineBytes / kPackBytes);
  cut.chunks = ceil_div(runs.packs, cut.share);
  cut.team_threads = team_threads(inputs, edges);
  cut.boundary = boundary;
  cut.bytes = cut.share * kPackBytes * inputs;
  if (cut.chunks > kMostChunks) return {};
  return cut;
}

// ---- rings

constexpr int kMostStages = 16;
constexpr int kSummers = 3;  // teams that sum terms
constexpr int kWriters = 2;  // teams that write results
constexpr int kCopies = 4;   // chunks whose copies are in flight together
// A warp that waits for a stage's copy must know that the stage's previous copy has ended: the warp has waited for that
// copy itself, or for one that began at least kCopies later.
constexpr int kFewestStages = 6;
static_assert(kFewestStages % kSummers == 0 && kFewestStages + 1 >= kSummers + kCopies);
// Rows of more chunks than this are awaited by two warps in turns. The number of stages is then even, so that each
// stage is one warp's.
constexpr int kLongRow = 64;

int64_t stages_of(const Cut& cut, const Device& device) {
  const int64_t shared = device.shared_memory_per_block - kSharedBytesBeside;
  const int64_t stages = std::min<int64_t>(kMostStages, shared / cut.bytes);
  return cut.chunks > kLongRow ? stages - stages % 2 : stages;
}

// Whether the rings of all blocks together hold a row.
bool fits_ring(const Cut& cut, const Problem& problem, const Device& device) {
  const int64_t stages = stages_of(cut, device);
  // If all rings together hold less than a row and a third, blocks wait for one another.
  return problem.footprint.packs && device.compute_capability >= 90 && stages >= kFewestStages &&
         cut.chunks <= stages * device.multiprocessors * 3 / 4 && problem.view.rows * cut.chunks < (1ll << 31);
}

}  // namespace

std::optional<Chunks> plan_chunks(const Problem& problem, const Device& device) {
  const std::optional<Cut> cut = cut_of(problem, device);
  if (!cut) return {};
  const int inputs = problem.cost.inputs;
  const bool clusters = device.largest_cluster > 1;
  const int64_t shared = device.shared_memory_per_block - kSharedBytesBeside;
  Chunks plan{};
  plan.chunks = static_cast<int>(cut->chunks);
  plan.share = static_cast<int>(cut->share);
  plan.team_threads = cut->team_threads;
  plan.boundary = cut->boundary;
  // Gives each block up to `teams` chunks, and the row to one cluster of up to `most_blocks`; false if that is too few.
  const auto spread = [&](int64_t teams, int64_t most_blocks) {
    teams = std::min({teams, shared / cut->bytes, cut->chunks});
    if (teams == 0) return false;
    const int64_t blocks = ceil_div(cut->chunks, teams);
    if (blocks > most_blocks) return false;
    plan.teams = static_cast<int>(ceil_div(cut->chunks, blocks));
    plan.cluster = static_cast<int>(blocks);
    return true;
  };
  const bool spread_out = problem.view.rows * cut->chunks <= device.multiprocessors;
  if (clusters && spread_out && spread(1, std::min(kSmallCluster, device.largest_cluster))) return plan;
  if (spread(kMostTeams, 1)) return plan;
  if (clusters && spread(inputs == 1 ? 1 : kMostTeams, device.largest_cluster)) return plan;
  // The rest is for rings, but for two cases. With rows of several runs, which they copy run by run, rings are slow.
  // And of few chunks in all, a cluster is done before a ring is full; but only where a ring would take the same rows
  // if there were more of them, so that a row's chunks do not depend on how many rows there are.
  const bool few = problem.view.rows * cut->chunks <= int64_t{kFewChunks} * device.multiprocessors &&
                   fits_ring(*cut, problem, device);
  if (clusters && (few || problem.view.reduced.size > 1) &&
      (spread(kMostTeams / 2, device.largest_cluster) || spread(kMostTeams, device.largest_cluster))) {
    return plan;
  }
  return {};
}

Launch launch_of(const Chunks& plan, const Problem& problem) {
  Launch launch{};
  launch.blocks = problem.view.rows * plan.cluster;
  launch.threads = plan.threads();
  launch.cluster = plan.cluster;
  launch.shared_bytes = shared_bytes_of(plan, problem.footprint);
  const bool edges = plan.boundary > 0 || plan.team_threads != team_threads(problem.cost.inputs, false);
  launch.resident = 65536 / (registers_of(problem, edges) * launch.threads);
  return launch;
}

std::optional<Ring> plan_ring(const Problem& problem, const Device& device) {
  const std::optional<Cut> cut = cut_of(problem, device);
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
  // Two chunks a ticket halve the atomics; of few chunks in all one, so that more multiprocessors have some.
  plan.ticket = problem.view.rows * cut->chunks <= int64_t{kFewChunks} * device.multiprocessors ? 1 : 2;
  plan.boundary = cut->boundary;
  return plan;
}

}  // namespace jax_softmax
