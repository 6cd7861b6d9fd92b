#include "plan/plan.h"

#include <algorithm>

namespace jax_softmax {

namespace {

constexpr size_t kMostParameterWords = 4096 / 8;     // of a kernel's parameters
constexpr int kMostRead = 31;                        // bits of kSidesRead (plan/source.cc)
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

std::string problem_of(const Call& call, Problem* problem) {
  *problem = Problem{};
  if (std::string message = make_view(call, &problem->view, &problem->sides); !message.empty()) return message;
  const Cost& cost = problem->cost = cost_of(call.op);
  if (split_lines(call.load).size() > static_cast<size_t>(cost.inputs)) {
    return "`load` has more lines than the operator has operands";
  }
  if (call.count(Role::kArray) + call.count(Role::kIndex) > kMostRead) {
    return "expressions read at most " + std::to_string(kMostRead) + " arrays and indices";
  }
  const size_t parameter_words = call.sides.size() + call.out.size() + cost.inputs + kMostRowResults + 2;
  if (parameter_words > kMostParameterWords) return "too many operands";
  problem->footprint.in_bytes = bytes_of(call.in);
  problem->footprint.out_bytes = bytes_of(call.out.empty() ? call.in : call.out[0]);
  problem->footprint.inputs = cost.inputs;
  problem->footprint.state_bytes = cost.state_bytes;
  problem->footprint.packs = true;
  problem->footprint.row_operands = cost.row_results > 0 || cost.row_numbers > 0;
  problem->float64 = arithmetic_of(call) == DType::kF64 ||
                     std::any_of(call.sides.begin(), call.sides.end(),
                                 [](const SideOperand& side) { return side.dtype == DType::kF64; });
  problem->masked = call.count(Role::kMask) > 0;
  problem->identity_load = call.load.empty();
  return {};
}

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

namespace {

using Function = Step<const char*>;

std::vector<Function> launches_of(const Plan& plan, const Problem& problem, const Device& device) {
  const View& view = problem.view;
  const int64_t rows = view.rows;
  const Footprint& footprint = problem.footprint;
  const auto combined = [&](int64_t rows_in_pieces, const Combining& combining, Launch sum, Launch finish,
                            const char* summing, const char* finishing) {
    Launch combine{ceil_div(rows_in_pieces, combining.rows_of_block()), Combining::kThreads};
    combine.overlaps = finish.overlaps = device.compute_capability >= 90;
    std::vector<Function> steps{{summing, sum, rows}, {"combine_pieces", combine, rows_in_pieces}};
    if (problem.cost.element_results) steps.push_back({finishing, finish, rows});
    return steps;
  };
  return std::visit(
      Overloaded{
          [&](const Registers& p) -> std::vector<Function> {
            return {{"registers", {ceil_div(rows, p.rows_of_block()), p.threads}, rows}};
          },
          [&](const Staged& p) -> std::vector<Function> {
            Launch launch{ceil_div(rows, p.rows), p.threads};
            launch.shared_bytes = geometry_of(view, p, footprint).shared_bytes;
            return {{"staged", launch, rows}};
          },
          [&](const Chunks& p) -> std::vector<Function> { return {{"chunks", launch_of(p, problem), rows}}; },
          [&](const Ring& p) -> std::vector<Function> {
            constexpr int kClearing = 256;  // threads
            const int64_t words = words_of(p, rows, footprint);
            Launch launch{std::min<int64_t>(device.multiprocessors, ceil_div(rows * p.chunks, p.ticket)), p.threads()};
            launch.shared_bytes = shared_bytes_of(p, footprint);
            launch.resident = 1;
            launch.cooperative = true;
            return {{"clear_words", {words / kClearing + 1, kClearing}, words}, {"ring", launch, rows}};
          },
          [&](const Tile& p) -> std::vector<Function> { return {{"tile", launch_of(p, problem, device), rows}}; },
          [&](const Twice& p) -> std::vector<Function> {
            const int64_t blocks = rows * p.blocks_of_row(runs_of(view, p.boundary, footprint));
            return combined(rows, combining_of(view, p, footprint), {rows * p.pieces, p.threads}, {blocks, p.threads},
                            "sum_pieces", "finish_pieces");
          },
          [&](const TwiceTile& p) -> std::vector<Function> {
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

// "registers lanes=32 packs=4 ..."
std::string describe(const Plan& plan) {
  std::string text = kScheduleNames[plan.index()];
  std::visit(
      [&](const auto& p) {
        p.each([&](const char* name, auto value) { text += std::string(" ") + name + "=" + std::to_string(value); });
      },
      plan);
  return text;
}

}  // namespace

std::vector<Step<jit::Source>> steps_of(const Plan& plan, const Problem& problem, const Call& call,
                                        const Device& device) {
  const std::string described = describe(plan) + ", " + describe(call);
  std::vector<Step<jit::Source>> steps;
  for (const Function& step : launches_of(plan, problem, device)) {
    steps.push_back({{source_of(plan, step, problem, call), described}, step.launch, step.rows});
  }
  return steps;
}

}  // namespace jax_softmax
