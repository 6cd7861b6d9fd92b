#include <algorithm>
#include <cmath>

#include "plan/plan.h"

namespace jax_softmax {

namespace {

constexpr int kThreads = 256;    // of a block, or a few fewer
constexpr int kMostBlocks = 16;  // of a cluster
// Threads that a multiprocessor must have registers for; fewer if a row has many sums.
constexpr int kThreadsAtOnce = 768, kFewerThreadsAtOnce = 512;
constexpr int kStaticBytes = 1 << 10;      // of a block: its static shared memory and what the system reserves
constexpr int64_t kMostNumbers = 1 << 30;  // elements that are counted in 32 bits
// Packs of a line of a tile: a cache line. Where lines are ragged, two, since the blocks of neighbouring tiles both
// read the packs at their border.
constexpr int kTilePacks = 8, kRaggedTilePacks = 16;
// Lines of a thread, of all operands: combining the states of several threads takes as long as some lines. Up to the
// first number a thread has all lines; folded lines are shared out so that a thread has about the second number.
constexpr int64_t kLinesOfThread = 16, kFoldedLinesOfThread = 8;
constexpr int kStatesBytes = 8 << 10;  // of shared memory that lines leave for states
// Teams have at least so many neighbouring packs together, if a matrix has them.
constexpr int kNeighbours = 4;
// The most bytes of states that the blocks of a cluster write into the shared memory of each.
constexpr int64_t kExchangedBytes = 24 << 10;
// Of the pieces of a tile that is read twice: packs of a line, lines of a thread of all operands, pieces of a tile.
constexpr int kPiecePacks = 32;
constexpr int64_t kPieceLinesOfThread = 32;
constexpr int64_t kMostPieces = 512;
constexpr int kFinished = 4;  // lines of a thread that computes results, of all operands

// A problem, with its view as lines.
struct TileProblem {
  explicit TileProblem(const Problem& problem)
      : problem(problem), footprint(problem.footprint), lines(lines_of(problem.view, footprint)) {}
  const Problem& problem;
  const Footprint& footprint;
  const Lines lines;

  int64_t lines_of_span(const Tile& tile) const { return jax_softmax::lines_of_span(lines, tile, footprint); }
  TileGeometry geometry(const Tile& tile) const { return geometry_of(problem.view, tile, footprint); }
};

// Shares out the lines to so many blocks; false if they do not fit into `room` bytes of shared memory.
bool share_out(Tile* tile, const TileProblem& problem, int64_t blocks, int64_t room) {
  const int64_t lines = problem.lines_of_span(*tile) * (tile->fold > 1 ? 1 : problem.lines.spans);
  const int64_t lines_of_thread = ceil_div(ceil_div(lines, blocks), tile->lines_at_once);
  if (lines_of_thread > 1 << 12) return false;
  tile->lines_of_thread = static_cast<int>(lines_of_thread);
  return problem.geometry(*tile).shared_bytes <= room;
}

// Shares out the lines to as few blocks as have room; false if that takes too many.
bool in_blocks(Tile* tile, const TileProblem& problem, int64_t most_blocks, int64_t room) {
  for (int64_t blocks = 1; blocks <= most_blocks; ++blocks) {
    if (share_out(tile, problem, blocks, room)) {
      const TileGeometry g = problem.geometry(*tile);
      return g.parts * g.rows * problem.footprint.state_bytes <= kExchangedBytes || blocks == 1;
    }
  }
  return false;
}

// A tile of folded lines: a matrix or several; nothing if a folded line has more packs than a block has threads.
std::optional<Tile> folded(const TileProblem& problem) {
  const Lines& lines = problem.lines;
  const int width = problem.footprint.width(), inputs = problem.footprint.inputs;
  Tile tile{};
  tile.elements = static_cast<int>(std::min<int64_t>(lines.elements, kThreads * width));
  tile.fold = std::max(2, width / static_cast<int>(common_divisor(width, lines.elements)));
  tile.packs = static_cast<int>(std::min<int64_t>(lines.elements * tile.fold / width, 1 << 20));
  if (tile.packs > kThreads || lines.run() > kMostNumbers) return {};
  tile.matrices = 1;
  tile.in_shared = true;
  tile.aligned = lines.run() % width == 0 || !problem.footprint.packs;
  // As many teams as leave each some lines, and then as many matrices as there are threads for.
  const int64_t all = problem.lines_of_span(tile);
  const int64_t fewest = std::min<int64_t>(all, ceil_div(kNeighbours, tile.packs));
  int64_t at_once = std::clamp<int64_t>(ceil_div(all * inputs, kFoldedLinesOfThread), fewest, kThreads / tile.packs);
  if (power_of_2(tile.packs)) at_once = std::min<int64_t>(next_power_of_2(at_once), kThreads / tile.packs);
  tile.lines_at_once = static_cast<int>(at_once);
  const int64_t threads = at_once * tile.packs;
  if (lines.spans == 1) tile.matrices = static_cast<int>(std::max<int64_t>(1, kThreads / threads));
  tile.threads = static_cast<int>(round_up(threads * tile.matrices, 32));
  return tile;
}

// A tile of `packs` packs of each line, and of more if lines are few. Threads have at most `lines_of_thread` lines of
// all operands, if possible.
Tile parts_of_lines(const TileProblem& problem, int packs, int64_t lines_of_thread) {
  const Lines& lines = problem.lines;
  const int width = problem.footprint.width(), inputs = problem.footprint.inputs;
  Tile tile{};
  tile.matrices = tile.fold = 1;
  tile.in_shared = true;
  tile.aligned = lines.aligned;
  // Packs more that a ragged line takes, at its beginning and for the elements that its last pack reaches into.
  const int beyond = lines.aligned ? 0 : 2;
  // Of few lines more packs each, so that all threads have some.
  const int64_t all = lines.spans * round_up(lines.neighbours, lines.period);
  const int64_t fewest = round_up(ceil_div(all * inputs, lines_of_thread), lines.period);
  int64_t at_once = std::min(std::max<int64_t>(kThreads / packs / lines.period, 1) * lines.period, fewest);
  packs = static_cast<int>(kThreads / at_once);
  if (lines.period == 1 && all * inputs <= 2 * lines_of_thread) {  // a thread has whole rows: nothing to combine
    at_once = 1;
    packs = static_cast<int>(std::min<int64_t>(kThreads, kThreads * lines_of_thread / (all * inputs)));
  }
  // Tiles of equal size.
  const int64_t most = static_cast<int64_t>(packs - beyond) * width;
  tile.elements = static_cast<int>(lines.elements <= most
                                       ? lines.elements
                                       : round_up(ceil_div(lines.elements, ceil_div(lines.elements, most)), width));
  tile.packs = static_cast<int>(ceil_div(tile.elements, width)) + beyond;
  // Powers of 2, so that the states of neighbouring lanes can be combined by shuffles.
  if (lines.aligned && at_once > 1) tile.packs = static_cast<int>(next_power_of_2(tile.packs));
  if (at_once > 1) at_once = std::max<int64_t>(kThreads / tile.packs / lines.period, 1) * lines.period;
  if (lines.aligned && at_once > 1) at_once = next_power_of_2(at_once + 1) / 2;
  at_once = std::min(at_once, std::max(round_up(all, lines.period), int64_t{1}));
  tile.lines_at_once = static_cast<int>(at_once);
  tile.threads = static_cast<int>(round_up(at_once * tile.packs, 32));
  return tile;
}

}  // namespace

std::optional<Tile> plan_tile(const Problem& problem, const Device& device) {
  if (problem.view.minor_reduced || problem.view.columns > kMostNumbers) return {};
  const TileProblem tile_problem(problem);
  const Lines& lines = tile_problem.lines;
  const bool narrow = lines.elements < kTilePacks * problem.footprint.width();
  const int most_blocks = std::min(kMostBlocks, device.largest_cluster);
  const auto room = [&](int resident) { return device.shared_memory_per_block / resident - kStaticBytes; };
  // Three blocks a multiprocessor, so that some copy while others compute; or two.
  if ((narrow || !lines.aligned) && lines.spans == 1) {
    if (std::optional<Tile> tile = folded(tile_problem)) {
      for (const int blocks : {1, most_blocks}) {
        for (const int resident : {3, 2}) {
          if (in_blocks(&*tile, tile_problem, blocks, room(resident))) return tile;
        }
      }
    }
  }
  // Then narrower tiles.
  const int packs = lines.aligned ? kTilePacks : kRaggedTilePacks;
  for (const int narrower : {1, 2, 4}) {
    if (narrower > 1 && !lines.aligned) break;  // two tiles would read most packs
    for (const int resident : {3, 2}) {
      const int64_t lines_of_thread =
          std::clamp<int64_t>((room(resident) - kStatesBytes) / (kThreads * kPackBytes), 1, kLinesOfThread);
      Tile tile = parts_of_lines(tile_problem, packs / narrower, lines_of_thread);
      if (in_blocks(&tile, tile_problem, most_blocks, room(resident))) return tile;
    }
  }
  return {};
}

std::optional<TwiceTile> plan_twice_tile(const Problem& problem, bool one_block) {
  if (problem.view.minor_reduced || problem.view.columns > kMostNumbers) return {};
  const TileProblem tile_problem(problem);
  const Lines& lines = tile_problem.lines;
  TwiceTile plan{};
  plan.one_block = one_block;
  const bool narrow = lines.elements < kPiecePacks * problem.footprint.width();
  // Folded lines have at least one piece for each span: too many for one block.
  const std::optional<Tile> whole = !one_block && (narrow || !lines.aligned) ? folded(tile_problem) : std::nullopt;
  plan.tile =
      whole ? *whole : parts_of_lines(tile_problem, lines.aligned ? kPiecePacks : kRaggedTilePacks, kLinesOfThread);
  plan.tile.matrices = 1;
  plan.tile.threads = static_cast<int>(round_up(plan.tile.lines_at_once * plan.tile.packs, 32));
  plan.tile.in_shared = false;
  // At least so many lines a piece that its states are little scratch memory.
  const int64_t fewest =
      kOperandOfScratch * problem.footprint.state_bytes / problem.footprint.in_bytes / plan.tile.fold;
  const int64_t all = tile_problem.lines_of_span(plan.tile) * lines.spans;
  const int64_t shared_out = plan.tile.fold > 1 ? tile_problem.lines_of_span(plan.tile) : all;  // see TileGeometry
  const int64_t wanted = std::max({fewest, ceil_div(all, kMostPieces), kPieceLinesOfThread * plan.tile.lines_at_once});
  int64_t pieces = std::max<int64_t>(1, shared_out / wanted);
  // One block adds up pieces one after the other: about as many as a thread has lines of each.
  if (one_block) pieces = std::min(pieces, static_cast<int64_t>(std::sqrt(all / plan.tile.lines_at_once)) + 1);
  plan.tile.lines_of_thread = static_cast<int>(ceil_div(ceil_div(shared_out, pieces), plan.tile.lines_at_once));
  plan.finished = kFinished / problem.cost.inputs;
  return plan;
}

Launch launch_of(const Tile& tile, const Problem& problem, const Device& device) {
  const TileGeometry g = geometry_of(problem.view, tile, problem.footprint);
  Launch launch{};
  launch.cluster = tile.in_shared ? static_cast<int>(g.parts) : 1;
  launch.blocks = g.tiles(problem.view.rows) * g.parts;
  launch.threads = tile.threads;
  launch.shared_bytes = g.shared_bytes;
  const int64_t fit = device.shared_memory_per_block / (launch.shared_bytes + kStaticBytes);
  const bool fewer = problem.cost.sums * problem.cost.inputs > 2;
  const int threads = fewer ? kFewerThreadsAtOnce : kThreadsAtOnce;
  launch.resident = static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(fit, threads / tile.threads), 1, 3));
  return launch;
}

}  // namespace jax_softmax
