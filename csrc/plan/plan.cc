#include "plan/plan.h"

#include <algorithm>

namespace jax_softmax {

namespace {

constexpr int64_t kMostElements = int64_t{1} << 56;  // far beyond any memory, so that sums of bytes fit 64 bits

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

bool scratch_is_little(const Plan& plan, const Problem& problem) {
  return scratch_bytes(plan, problem) <= problem.view.elements() * problem.footprint.in_bytes / kOperandOfScratch;
}

}  // namespace

std::optional<Plan> make_plan(const Problem& problem, const Device& device) {
  if (problem.view.elements() == 0 || problem.view.elements() > kMostElements) return {};
  if (problem.float64) return {};
  const auto of = [&](const auto& plan) -> std::optional<Plan> {
    if (!plan || !scratch_is_little(*plan, problem)) return {};
    return *plan;
  };
  if (auto plan = of(plan_staged(problem))) return plan;
  if (auto plan = of(plan_registers(problem, device))) return plan;
  if (problem.cost.element_results) {  // without them, nothing that has been read is needed again
    if (auto plan = of(plan_chunks(problem, device))) return plan;
    if (auto plan = of(plan_ring(problem, device))) return plan;
  }
  if (auto plan = of(plan_tile(problem, device))) return plan;
  if (auto plan = of(plan_twice(problem))) return plan;
  if (auto plan = of(plan_twice_tile(problem, false))) return plan;
  return of(plan_twice_tile(problem, true));
}

int64_t scratch_bytes(const Plan& plan, const Problem& problem) {
  const View& view = problem.view;
  const Footprint& footprint = problem.footprint;
  return std::visit(Overloaded{
                        [&](const Ring& p) { return (words_of(p, view.rows, footprint) + 1) * 8; },  // and a counter
                        [&](const Twice& p) { return view.rows * p.pieces * footprint.state_bytes; },
                        [&](const TwiceTile& p) {
                          const TileGeometry g = geometry_of(view, p.tile, footprint);
                          return p.one_block ? 0 : g.tiles(view.rows) * g.rows * g.parts * footprint.state_bytes;
                        },
                        [&](const auto&) { return int64_t{0}; },
                    },
                    plan);
}

std::vector<Step> steps_of(const Plan& plan, const Problem& problem, const Device& device) {
  const View& view = problem.view;
  const int64_t rows = view.rows;
  const Footprint& footprint = problem.footprint;
  const auto combined = [&](int64_t rows_in_pieces, const Combining& combining, Launch sum, Launch finish,
                            const char* summing, const char* finishing) {
    Launch combine{ceil_div(rows_in_pieces, combining.rows_of_block()), Combining::kThreads};
    combine.overlaps = finish.overlaps = device.compute_capability >= 90;
    std::vector<Step> steps{{summing, sum, rows}, {"combine_pieces", combine, rows_in_pieces}};
    if (problem.cost.element_results) steps.push_back({finishing, finish, rows});
    return steps;
  };
  return std::visit(
      Overloaded{
          [&](const Registers& p) -> std::vector<Step> {
            return {{"registers", {ceil_div(rows, p.rows_of_block()), p.threads}, rows}};
          },
          [&](const Staged& p) -> std::vector<Step> {
            Launch launch{ceil_div(rows, p.rows), p.threads};
            launch.shared_bytes = geometry_of(view, p, footprint).shared_bytes;
            return {{"staged", launch, rows}};
          },
          [&](const Chunks& p) -> std::vector<Step> { return {{"chunks", launch_of(p, problem), rows}}; },
          [&](const Ring& p) -> std::vector<Step> {
            constexpr int kClearing = 256;  // threads
            const int64_t words = words_of(p, rows, footprint);
            Launch launch{std::min<int64_t>(device.multiprocessors, ceil_div(rows * p.chunks, p.ticket)), p.threads()};
            launch.shared_bytes = shared_bytes_of(p, footprint);
            launch.resident = 1;
            launch.cooperative = true;
            return {{"clear_words", {words / kClearing + 1, kClearing}, words}, {"ring", launch, rows}};
          },
          [&](const Tile& p) -> std::vector<Step> { return {{"tile", launch_of(p, problem, device), rows}}; },
          [&](const Twice& p) -> std::vector<Step> {
            const int64_t blocks = rows * p.blocks_of_row(runs_of(view, p.boundary, footprint));
            return combined(rows, combining_of(view, p, footprint), {rows * p.pieces, p.threads}, {blocks, p.threads},
                            "sum_pieces", "finish_pieces");
          },
          [&](const TwiceTile& p) -> std::vector<Step> {
            Launch sum = launch_of(p.tile, problem, device), finish = launch_of(p.smaller(), problem, device);
            const TileGeometry g = geometry_of(view, p.tile, footprint);
            if (p.one_block) {
              sum.blocks = g.tiles(rows);
              return {{"whole_tiles", sum, rows}};
            }
            finish.resident = 0;
            return combined(g.tiles(rows) * g.rows, combining_of(view, p, footprint), sum, finish, "sum_tile_pieces",
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
