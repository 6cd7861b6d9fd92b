#include "plan/plan.h"

#include <algorithm>

#include "plan/chunks.h"
#include "plan/tile.h"

namespace jax_softmax {

namespace {

// Memory for states may take so much of the operand, however many rows there are: lest a row's plan depend on that.
constexpr int kOperandOfScratch = 20;
constexpr int64_t kMostElements = int64_t{1} << 56;  // far beyond any memory, so that sums of bytes fit 64 bits
// Runs of fewer packs than this, that do not begin with whole ones, cost more at their edges than XLA does altogether.
constexpr int kShortRun = 8;
// Aligned rows of so many packs leave one in four lanes idle: with a logarithm for each, XLA is as fast.
constexpr int kIdlingPacks = 3;
// Runs of two operands, in rows of several, that are shorter pass through rings more slowly than XLA reads them twice.
constexpr int kShortRunBytes = 2048;

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

int64_t state_bytes_of_pieces(int64_t rows, int64_t pieces, const Problem& problem) {
  return rows * pieces * problem.state_bytes();
}

bool scratch_is_little(const Plan& plan, const Problem& problem) {
  return scratch_bytes(plan, problem) <= problem.view.elements() * problem.in_bytes / kOperandOfScratch;
}

}  // namespace

Runs runs_of(const Problem& problem, int boundary) {
  const View& view = problem.view;
  const int width = problem.width();
  const auto whole = [&](int64_t n) { return n % width == 0; };
  Runs runs{};
  runs.run = view.reduced.dim[view.reduced.size - 1].extent;
  runs.runs = view.columns / runs.run;
  runs.aligned = true;
  for (int i = 0; i < view.kept.size; ++i) runs.aligned &= whole(view.kept.dim[i].stride);
  for (int i = 0; i + 1 < view.reduced.size; ++i) runs.aligned &= whole(view.reduced.dim[i].stride);
  if (runs.runs == 1) runs.aligned &= whole(runs.run);  // a single row is cut as one of many
  runs.aligned |= !problem.packs;                       // elements are accessed one by one
  runs.boundary = runs.aligned ? 0 : runs.runs == 1 ? boundary : kPackBytes;
  const int64_t shift = runs.aligned ? 0 : runs.boundary / problem.in_bytes - 1;
  runs.run_packs = ceil_div(runs.run + shift, width);
  runs.packs = runs.runs * runs.run_packs;
  return runs;
}

std::optional<Plan> make_plan(const Problem& problem, const Device& device) {
  if (problem.view.elements() == 0 || problem.view.elements() > kMostElements) return {};
  const auto of = [&](const auto& plan) -> std::optional<Plan> {
    if (!plan || !scratch_is_little(*plan, problem)) return {};
    return *plan;
  };
  if (auto plan = of(plan_staged(problem, device))) return plan;
  if (auto plan = of(plan_registers(problem, device))) return plan;
  if (problem.cost.element_results) {  // or else there is no need to hold what has been read
    if (auto plan = of(plan_chunks(problem, device))) return plan;
    if (auto plan = of(plan_ring(problem, device))) return plan;
  }
  if (auto plan = of(plan_tile(problem, device))) return plan;
  if (auto plan = of(plan_twice(problem, device))) return plan;
  if (auto plan = of(plan_twice_tile(problem, device))) return plan;
  if (!problem.scratch) return {};
  Problem without = problem;
  without.scratch = false;
  return make_plan(without, device);
}

bool faster_than_xla(const Plan& plan, const Problem& problem) {
  const View& view = problem.view;
  const Runs runs = runs_of(problem, kPackBytes);
  if (view.minor_reduced && runs.runs > 1 && !runs.aligned && runs.run < kShortRun * problem.width()) return false;
  // Labels' elements are then in lines far apart, and XLA has more of them under way at once.
  if (problem.cost.labelled && !problem.cost.element_results && !view.minor_reduced) return false;
  const bool logarithm = problem.cost.logarithms > 0 && problem.cost.element_results && problem.cost.row_results == 0;
  if (logarithm && problem.plain && view.contiguous_rows() && runs.aligned && runs.packs == kIdlingPacks) return false;
  const bool two = problem.cost.inputs == 2 && problem.cost.element_results;
  if (two && std::holds_alternative<Ring>(plan) && runs.runs > 1 && runs.run * problem.in_bytes < kShortRunBytes) {
    return false;
  }
  // A sector of each line, of two operands: other blocks read the rest of the cache lines, at other times.
  if (const auto* tile = std::get_if<Tile>(&plan)) {
    const int64_t line = view.reduced.dim[view.reduced.size - 1].stride;
    return !(two && tile->fold == 1 && tile->elements < line && tile->packs * kPackBytes <= kSectorBytes);
  }
  // Two operands read twice, from whole packs: so does XLA, as fast.
  if (const auto* twice = std::get_if<Twice>(&plan)) return !(two && twice->boundary == 0);
  if (const auto* twice = std::get_if<TwiceTile>(&plan)) return !twice->one_block && !(two && twice->tile.aligned);
  return true;
}

int64_t scratch_bytes(const Plan& plan, const Problem& problem) {
  const View& view = problem.view;
  const int64_t counter = 8;
  return std::visit(
      Overloaded{
          [&](const Chunks& p) {
            return p.through_memory ? state_bytes_of_pieces(view.rows, p.chunks, problem) + counter : 0;
          },
          [&](const Ring& p) { return state_bytes_of_pieces(view.rows, p.chunks, problem) + counter; },
          [&](const Twice& p) { return p.one_block ? 0 : state_bytes_of_pieces(view.rows, p.pieces, problem); },
          [&](const TwiceTile& p) {
            const int64_t rows = tiles_of(p.tile, problem) * rows_of(p.tile, problem);
            return p.one_block ? 0 : state_bytes_of_pieces(rows, parts_of(p.tile, problem), problem);
          },
          [&](const auto&) { return int64_t{0}; },
      },
      plan);
}

std::vector<Step> steps_of(const Plan& plan, const Problem& problem, const Device& device) {
  const int64_t rows = problem.view.rows;
  const auto cleared = [&](int64_t chunks, Step step) {
    constexpr int kThreads = 256;
    const int64_t words = rows * chunks * problem.state_bytes() / 8;
    return std::vector<Step>{{"clear_words", {words / kThreads + 1, kThreads}, words}, step};
  };
  const auto combined = [&](int64_t all_rows, int64_t together, Launch sum, Launch finish, const char* summing,
                            const char* finishing) {
    Launch combine{ceil_div(all_rows, together), 256};
    combine.overlaps = finish.overlaps = true;
    std::vector<Step> steps{{summing, sum, rows}, {"combine_pieces", combine, all_rows}};
    if (problem.cost.element_results) steps.push_back({finishing, finish, rows});
    return steps;
  };
  return std::visit(
      Overloaded{
          [&](const Registers& p) -> std::vector<Step> {
            const int of_pack = rows_of_pack(problem);
            Launch launch{ceil_div(rows, p.threads / p.lanes * of_pack), p.threads};
            if (of_pack > 1) return {{"rows_in_packs", launch, rows}};
            launch.shared_bytes = p.unused;
            return {{"registers", launch, rows}};
          },
          [&](const Staged& p) -> std::vector<Step> {
            Launch launch{ceil_div(rows, p.rows), p.threads};
            launch.shared_bytes = shared_bytes_of(p, problem);
            return {{"staged", launch, rows}};
          },
          [&](const Chunks& p) -> std::vector<Step> {
            const Step step{"chunks", launch_of(p, problem), rows};
            return p.through_memory ? cleared(p.chunks, step) : std::vector<Step>{step};
          },
          [&](const Ring& p) {
            Launch launch{device.multiprocessors, p.team_threads * (p.summers + p.writers) + 32 * (2 + p.waiters)};
            launch.shared_bytes = static_cast<int64_t>(p.stages) * p.share * kPackBytes * problem.cost.inputs;
            launch.resident = 1;
            launch.cooperative = true;
            return cleared(p.chunks, {"ring", launch, rows});
          },
          [&](const Tile& p) -> std::vector<Step> { return {{"tile", launch_of(p, problem, device), rows}}; },
          [&](const Twice& p) -> std::vector<Step> {
            if (p.one_block) return {{"whole_rows", {rows, p.threads}, rows}};
            const Runs runs = runs_of(problem, p.boundary);
            const int64_t parts = ceil_div(runs.packs, static_cast<int64_t>(p.finished) * p.threads);
            return combined(rows, 8, {rows * p.pieces, p.threads}, {rows * parts, p.threads}, "sum_pieces",
                            "finish_pieces");
          },
          [&](const TwiceTile& p) -> std::vector<Step> {
            Launch launch = launch_of(p.tile, problem, device);
            if (p.one_block) return {{"whole_tiles", launch, rows}};
            const int64_t tiles = launch.blocks;
            launch.blocks = tiles * parts_of(p.tile, problem);
            Tile smaller = p.tile;
            smaller.turns = p.finished;
            Launch finish = launch;
            finish.blocks = tiles * parts_of(smaller, problem);
            finish.resident = 0;
            return combined(tiles * rows_of(p.tile, problem), 32, launch, finish, "sum_tile_pieces",
                            "finish_tile_pieces");
          },
      },
      plan);
}

std::string describe(const Plan& plan) {
  std::string text = kScheduleNames[plan.index()];
  std::visit(
      [&](const auto& p) {
        p.each([&](const char* name, auto value) { text += std::string(" ") + name + "=" + std::to_string(value); });
      },
      plan);
  return text;
}

}  // namespace jax_softmax
