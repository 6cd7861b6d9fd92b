#include "plan/tile.h"

#include <algorithm>
#include <numeric>

namespace jax_softmax {

namespace {

constexpr int kThreads = 256;    // of a block, or a few fewer
constexpr int kMostBlocks = 16;  // of a cluster
// That a multiprocessor has room for in registers; fewer if elements have 8 bits, since packs then have many, or if
// there are several sums of several operands.
constexpr int kThreadsAtOnce = 768, kFewerThreadsAtOnce = 512;
constexpr int kStaticBytes = 1 << 10;      // static shared memory, and what the system keeps of a block's
constexpr int64_t kMostNumbers = 1 << 30;  // that are counted in 32 bits
// Lines are read in parts of a cache line. Where they begin anywhere, in parts of twice that, since both ends of a part
// are read by two blocks.
constexpr int kPartPacks = 8, kRaggedPartPacks = 16;
// Lines of a thread, of all operands, up to which it has all there are, or about that many if they are folded: to put
// threads' states together takes as long as some lines.
constexpr int64_t kTurns = 16, kFoldedTurns = 8;
constexpr int kStatesBytes = 8 << 10;  // of shared memory that is left for them
constexpr int kNeighbours = 4;         // packs
// What blocks of a cluster tell each other, bytes at the most in the shared memory of each.
constexpr int64_t kExchangedBytes = 24 << 10;
// The piece of a tile that is read twice: its part of a line, lines of a thread of all operands, and the most pieces
// whose states are put together.
constexpr int kPiecePacks = 32;
constexpr int64_t kPieceTurns = 32;
constexpr int64_t kMostPieces = 512;
constexpr int kFinished = 4;  // lines of a thread that finishes, of all operands

// How a view's memory looks as lines.
struct Lines {
  int64_t inner;   // elements of a line
  int64_t extent;  // of the innermost reduced dimension: lines that are neighbours in memory
  int64_t spans;   // of so many lines, of an array
  bool aligned;    // whether all lines begin with whole packs
  int period;      // lines so many apart begin alike in a pack
};

Lines lines_of(const Problem& problem) {
  const View& view = problem.view;
  const Dim& innermost = view.reduced.dim[view.reduced.size - 1];
  const int width = problem.width();
  Lines lines{innermost.stride, innermost.extent, view.columns / innermost.extent, true, 1};
  const auto whole = [&](int64_t n) { return n % width == 0; };
  lines.aligned = whole(lines.inner);
  for (int i = 0; i < view.reduced.size; ++i) lines.aligned &= whole(view.reduced.dim[i].stride);
  for (int i = 0; i < outer_kept(view); ++i) lines.aligned &= whole(view.kept.dim[i].stride);
  lines.aligned |= !problem.packs;  // elements are accessed one by one
  if (!lines.aligned) lines.period = width / static_cast<int>(std::gcd<int64_t>(width, lines.inner));
  return lines;
}

bool power_of_2(int64_t n) { return (n & (n - 1)) == 0; }
int64_t next_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// Lines of a span: as many as whole periods have, or folded ones.
int64_t span_of(const Tile& tile, const Problem& problem, const Lines& lines) {
  if (tile.fold == 1) return round_up(lines.extent, lines.period);
  const int width = problem.width();
  return ceil_div(lines.extent * lines.inner + (tile.aligned ? 0 : width - 1),
                  static_cast<int64_t>(tile.packs) * width);
}

// Shares out the lines to so many blocks; false if there is no room for that.
bool share_out(Tile* tile, const Problem& problem, const Lines& lines, int64_t blocks, int64_t room) {
  const int64_t span = span_of(*tile, problem, lines), shared = tile->fold > 1 ? span : span * lines.spans;
  const int64_t turns = ceil_div(ceil_div(shared, blocks), tile->groups);
  if (turns > 1 << 12) return false;
  tile->turns = static_cast<int>(turns);
  return shared_bytes_of(*tile, problem) <= room;
}

// As few blocks as have room, or false.
bool in_blocks(Tile* tile, const Problem& problem, const Lines& lines, int64_t most_blocks, int64_t room) {
  for (int64_t blocks = 1; blocks <= most_blocks; ++blocks) {
    if (share_out(tile, problem, lines, blocks, room)) {
      return parts_of(*tile, problem) * rows_of(*tile, problem) * problem.state_bytes() <= kExchangedBytes ||
             blocks == 1;
    }
  }
  return false;
}

// All of an array, lines being folded to whole packs; nothing if that takes too many threads.
std::optional<Tile> folded(const Problem& problem, const Lines& lines) {
  const int width = problem.width(), inputs = problem.cost.inputs;
  Tile tile{};
  tile.elements = static_cast<int>(std::min<int64_t>(lines.inner, kThreads * width));
  tile.fold = std::max(2, width / static_cast<int>(std::gcd<int64_t>(width, lines.inner)));
  tile.packs = static_cast<int>(std::min<int64_t>(lines.inner * tile.fold / width, 1 << 20));
  if (tile.packs > kThreads || lines.extent * lines.inner > kMostNumbers) return {};
  tile.arrays = 1;
  tile.held = true;
  tile.aligned = lines.extent * lines.inner % width == 0 || !problem.packs;
  // As many groups as leave a thread some lines, and then arrays.
  const int64_t span = span_of(tile, problem, lines);
  // As neighbouring threads read neighbouring packs, some of them at least.
  const int64_t neighbours = std::min<int64_t>(span, ceil_div(kNeighbours, tile.packs));
  int64_t groups = std::clamp<int64_t>(ceil_div(span * inputs, kFoldedTurns), neighbours, kThreads / tile.packs);
  if (power_of_2(tile.packs)) groups = std::min<int64_t>(next_power_of_2(groups), kThreads / tile.packs);
  tile.groups = static_cast<int>(groups);
  const int64_t team = groups * tile.packs;
  if (lines.spans == 1) tile.arrays = static_cast<int>(std::max<int64_t>(1, kThreads / team));
  tile.threads = static_cast<int>(round_up(team * tile.arrays, 32));
  return tile;
}

// A part of each line, of so many packs, for threads that have no more than so many of all operands if that can be.
Tile parts_of_lines(const Problem& problem, const Lines& lines, int packs, int64_t turns) {
  const int width = problem.width(), inputs = problem.cost.inputs;
  Tile tile{};
  tile.arrays = tile.fold = 1;
  tile.held = true;
  tile.aligned = lines.aligned;
  // Packs that a line takes more if it begins anywhere, and the tile has what its last packs reach into.
  const int beyond = lines.aligned ? 0 : 2;
  // Of few lines, wider parts, so that all threads have some.
  const int64_t all = lines.spans * round_up(lines.extent, lines.period);
  const int64_t fewest = round_up(ceil_div(all * inputs, turns), lines.period);  // groups
  int64_t groups = std::min(std::max<int64_t>(kThreads / packs / lines.period, 1) * lines.period, fewest);
  packs = static_cast<int>(kThreads / groups);
  if (lines.period == 1 && all * inputs <= 2 * turns) {  // no groups at all: nothing to put together
    groups = 1;
    packs = static_cast<int>(std::min<int64_t>(kThreads, kThreads * turns / (all * inputs)));
  }
  // Equal parts.
  const int64_t most = static_cast<int64_t>(packs - beyond) * width;
  tile.elements = static_cast<int>(
      lines.inner <= most ? lines.inner : round_up(ceil_div(lines.inner, ceil_div(lines.inner, most)), width));
  tile.packs = static_cast<int>(ceil_div(tile.elements, width)) + beyond;
  // Powers of 2, so that neighbouring groups can be put together by shuffles.
  if (lines.aligned && groups > 1) tile.packs = static_cast<int>(next_power_of_2(tile.packs));
  if (groups > 1) groups = std::max<int64_t>(kThreads / tile.packs / lines.period, 1) * lines.period;
  if (lines.aligned && groups > 1) groups = next_power_of_2(groups + 1) / 2;
  groups = std::min(groups, std::max(round_up(all, lines.period), int64_t{1}));
  tile.groups = static_cast<int>(groups);
  tile.threads = static_cast<int>(round_up(groups * tile.packs, 32));
  return tile;
}

}  // namespace

int outer_kept(const View& view) {
  const int64_t inner = view.reduced.dim[view.reduced.size - 1].stride;
  int outer = 0;
  while (outer < view.kept.size && view.kept.dim[outer].stride > inner) ++outer;
  return view.minor_reduced ? view.kept.size : outer;
}

int64_t rows_of(const Tile& tile, const Problem& problem) {
  const bool reaches = !tile.aligned && tile.fold == 1;
  return static_cast<int64_t>(tile.arrays) * tile.elements + (reaches ? problem.width() - 1 : 0);
}

int64_t parts_of(const Tile& tile, const Problem& problem) {
  const Lines lines = lines_of(problem);
  const int64_t span = span_of(tile, problem, lines), of_block = static_cast<int64_t>(tile.groups) * tile.turns;
  return tile.fold > 1 ? ceil_div(span, of_block) * lines.spans : ceil_div(span * lines.spans, of_block);
}

int64_t shared_bytes_of(const Tile& tile, const Problem& problem) {
  const int width = problem.width();
  const int64_t packs = tile.held ? static_cast<int64_t>(tile.turns) * tile.threads * problem.cost.inputs : 0;
  const Lines lines = lines_of(problem);
  const bool in_pack = tile.fold > 1 && tile.aligned && tile.packs == 1;
  const bool shuffles = (lines.period == 1 || tile.fold > 1) && tile.groups > 1 && tile.packs < 32 &&
                        power_of_2(tile.packs) && power_of_2(tile.groups);
  const int together = !shuffles ? 1 : tile.packs * tile.groups < 32 ? tile.groups : 32 / tile.packs;
  const int64_t entries = tile.groups / together, copies = in_pack ? 1 : tile.fold;
  const int64_t parts = tile.held ? parts_of(tile, problem) : 1, rows = rows_of(tile, problem);
  int64_t states = 0;
  if (!tile.held || parts > 1 || entries > 1 || copies > 1 || problem.cost.row_results > 0 ||
      problem.cost.row_numbers > 0) {
    const int64_t of_threads = entries * tile.arrays * tile.packs * (in_pack ? lines.inner : width);
    states = std::max(of_threads, parts > 1 ? parts * rows : 0) + rows;
  }
  return packs * kPackBytes + states * problem.state_bytes();
}

std::optional<Tile> plan_tile(const Problem& problem, const Device& device) {
  const View& view = problem.view;
  if (view.minor_reduced || view.columns > kMostNumbers) return {};
  const Lines lines = lines_of(problem);
  const bool narrow = lines.inner < kPartPacks * problem.width();
  const int most_blocks = std::min(kMostBlocks, device.largest_cluster);
  const auto room = [&](int resident) { return device.shared_memory_per_block / resident - kStaticBytes; };
  // Three blocks to a multiprocessor, so that some copy while others compute; or two.
  if ((narrow || !lines.aligned) && lines.spans == 1) {
    if (std::optional<Tile> tile = folded(problem, lines)) {
      for (const int blocks : {1, most_blocks}) {
        for (const int resident : {3, 2}) {
          if (in_blocks(&*tile, problem, lines, blocks, room(resident))) return tile;
        }
      }
    }
  }
  // Then narrower parts.
  const int packs = lines.aligned ? kPartPacks : kRaggedPartPacks;
  for (const int narrower : {1, 2, 4}) {
    if (narrower > 1 && !lines.aligned) break;  // most of what they read would be read by two
    for (const int resident : {3, 2}) {
      const int64_t turns = std::clamp<int64_t>((room(resident) - kStatesBytes) / (kThreads * kPackBytes), 1, kTurns);
      Tile tile = parts_of_lines(problem, lines, packs / narrower, turns);
      if (in_blocks(&tile, problem, lines, most_blocks, room(resident))) return tile;
    }
  }
  return {};
}

std::optional<TwiceTile> plan_twice_tile(const Problem& problem, const Device& device) {
  const View& view = problem.view;
  if (view.minor_reduced || view.columns > kMostNumbers) return {};
  const Lines lines = lines_of(problem);
  TwiceTile plan{};
  const bool narrow = lines.inner < kPiecePacks * problem.width();
  const std::optional<Tile> whole = narrow || !lines.aligned ? folded(problem, lines) : std::nullopt;
  plan.tile = whole ? *whole : parts_of_lines(problem, lines, lines.aligned ? kPiecePacks : kRaggedPartPacks, kTurns);
  plan.tile.arrays = 1;
  plan.tile.threads = static_cast<int>(round_up(plan.tile.groups * plan.tile.packs, 32));
  plan.tile.held = false;
  // Pieces of some lines: at least so many that states take less than a twentieth of what they are of.
  const int64_t fewest = 20 * problem.state_bytes() / problem.in_bytes / plan.tile.fold;
  const int64_t span = span_of(plan.tile, problem, lines), spans = plan.tile.fold > 1 ? 1 : lines.spans;
  const int64_t wanted = std::max({fewest, ceil_div(span * lines.spans, kMostPieces), kPieceTurns * plan.tile.groups});
  const int64_t pieces = std::max<int64_t>(1, span * spans / wanted);
  plan.tile.turns = static_cast<int>(ceil_div(ceil_div(span * spans, pieces), plan.tile.groups));
  plan.finished = kFinished / problem.cost.inputs;
  plan.one_block = !problem.scratch;
  return plan;
}

int64_t tiles_of(const Tile& tile, const Problem& problem) {
  const int64_t inner = lines_of(problem).inner;
  return ceil_div(problem.view.rows / inner, tile.arrays) * ceil_div(inner, tile.elements);
}

Launch launch_of(const Tile& tile, const Problem& problem, const Device& device) {
  Launch launch{};
  launch.cluster = tile.held ? static_cast<int>(parts_of(tile, problem)) : 1;
  launch.blocks = tiles_of(tile, problem) * launch.cluster;
  launch.threads = tile.threads;
  launch.shared_bytes = shared_bytes_of(tile, problem);
  const int64_t fit = device.shared_memory_per_block / (launch.shared_bytes + kStaticBytes);
  const bool fewer = problem.in_bytes == 1 || (problem.cost.sums > 1 && problem.cost.inputs > 1);
  const int threads = fewer ? kFewerThreadsAtOnce : kThreadsAtOnce;
  launch.resident = static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(fit, threads / tile.threads), 1, 3));
  return launch;
}

}  // namespace jax_softmax
