#include "plan_tile.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

namespace jax_softmax {
namespace {

// The last results of a function of integers, which several threads may ask for.
template <class Result>
class Kept {
 public:
  template <class Function>
  Result get(const std::vector<int64_t>& key, Function function) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = results_.find(key);
      if (found != results_.end()) return found->second;
    }
    const Result result = function();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (results_.size() == kMost) results_.clear();
    results_.emplace(key, result);
    return result;
  }

 private:
  static constexpr size_t kMost = 1000;
  std::mutex mutex_;
  std::map<std::vector<int64_t>, Result> results_;
};

Dims without_last(Dims dims) {
  --dims.size;
  return dims;
}

// The tile schedule: bytes of a block's tile, and of a line in it at the least.
constexpr int kTileBytes = 64 << 10;
constexpr int kTileLineBytes = 64;
constexpr int kTeamParts = 8;
// A block with more has a multiprocessor for itself.
constexpr int kLonelyTileBytes = 112 << 10;
// Where a tile fits that, some tile fits every chip, and needs no scratch memory.
constexpr Device kSmallestDevice{75, 1, 64 << 10, 1};
constexpr int kMostTilePieces = 256;
// Lanes that have neighbouring packs of a run add up first, if there are a multiple of so many; if not, a tile takes
// longer. Where runs begin anywhere in a pack, those at their edges take longer: wide tiles have them in most warps.
constexpr int kPacksAddedUp = 8;
constexpr double kAddedUpAlone = 0.94;
constexpr int kMostRaggedPacks = 32;
constexpr int kMostHeldPacks = 40;         // of a thread, where a shape is looked for
constexpr int kReservedBytes = 1 << 10;    // of shared memory, for each block
constexpr int64_t kPieceLines = 64;        // of a thread, at the least
constexpr int kMostTileNumbers = 1 << 30;  // packs, lines, positions that are counted in 32 bits

constexpr int state_bytes(int bytes) { return 2 * std::max(bytes, 4); }

// Lines so many apart begin alike in a pack.
int64_t turn_of(int width, int64_t stride) { return width / std::gcd<int64_t>(width, stride); }

// A tile of `packs` of each line in `groups` of lines, with some lines to a thread; false if that is too large.
bool lay_out(CudaPlan* plan, Tile tile, int packs, int groups, int held, int bytes, int inputs, int most_threads,
             const Device& device, int most_blocks, bool passes) {
  const int width = kPackBytes / bytes;
  const int64_t all_lines = tile.lines.elements(), outer = tile.kept.elements();
  if (packs < 1 || packs * groups > most_threads) return false;
  tile.packs = packs;
  tile.groups = groups;
  tile.all_lines = static_cast<int>(all_lines);
  const int64_t sets = tile.sets.elements();
  if (passes) {
    const int64_t most = std::max<int64_t>(kMostTilePieces / sets, 1), least = sets > 1 ? 1 : 2;
    tile.cluster = static_cast<int>(std::clamp<int64_t>(all_lines / groups / kPieceLines, least, most));
  } else {
    tile.cluster = static_cast<int>(ceil_div(all_lines, static_cast<int64_t>(groups) * held));
    if (tile.cluster > most_blocks) return false;
  }
  tile.block_lines = static_cast<int>(ceil_div(all_lines, tile.cluster));
  tile.set_pieces = static_cast<int>(ceil_div(all_lines, tile.block_lines));
  if (sets * tile.set_pieces > kMostTileNumbers) return false;
  tile.cluster = static_cast<int>(sets * tile.set_pieces);
  tile.held = static_cast<int>(ceil_div(tile.block_lines, groups));
  const bool shifting = !tile.spanning && !tile.run;
  int64_t& tiles = tile.tiles;
  if (tile.spanning) {
    tile.segment_packs = tile.segment / width;
    tile.all_packs = outer * tile.segment_packs;
    if (tile.all_packs > kMostTileNumbers) return false;
    tiles = ceil_div(tile.all_packs, packs);
  } else if (shifting) {
    // What the packs of a line cover at the least, wherever it begins.
    const int64_t reach = (packs - 1) * width + 1;
    tile.halo = tile.inner == 1 && reach < tile.segment ? width - 1 : 0;
    tile.width = static_cast<int>(std::min((reach - tile.halo) / tile.inner * tile.inner, tile.segment));
    if (tile.width <= 0) return false;
    tile.segment_tiles = static_cast<int>(ceil_div(tile.segment, tile.width));
    tiles = outer * tile.segment_tiles;
  } else {
    tile.segments = tile.cluster == 1 || passes ? std::max(1, most_threads / (packs * groups)) : 1;
    if (sets > 1) {
      // No more than there are in a set: each has states for all of its pieces. What lies outside does not count, lest
      // a row's bits depend on it.
      int64_t inside = 1;
      for (int i = 0; i < tile.kept.size; ++i) {
        if (tile.kept.dim[i].stride < tile.sets.dim[0].stride) inside *= tile.kept.dim[i].extent;
      }
      tile.segments = static_cast<int>(std::min<int64_t>(tile.segments, inside));
    }
    tile.unit = packs;
    packs *= tile.segments;
    tile.packs = packs;
    tile.all_segments = outer;
    if (outer > kMostTileNumbers) return false;
    tiles = ceil_div(outer, tile.segments);
  }
  const int threads = static_cast<int>(ceil_div(packs * groups, 32) * 32);
  if (tile.separate) {
    const bool same_in_warp =
        tile.spanning || (shifting && threads / 32 % turn_of(width, tile.lines.dim[tile.lines.size - 1].stride) == 0);
    tile.shuffled = same_in_warp && packs < 32 && (packs & (packs - 1)) == 0 && packs * groups == threads;
    tile.entry_rows = tile.shuffled ? threads / 32 : groups;
    tile.entries = packs * (width + 1);  // of which one a pack stays free
    tile.positions = shifting ? tile.width + tile.halo : packs * width;
  } else {
    // Neighbouring lanes that share a row, a power of 2.
    tile.shuffled = std::gcd(static_cast<int>(tile.run ? tile.unit : tile.inner / width), 32);
    tile.entry_rows = groups;
    tile.entries = tile.positions = packs / tile.shuffled;
  }
  const int of_row = tile.separate ? 1 : width * tile.shuffled;  // elements that a position stands for
  tile.columns = static_cast<int>(tile.run ? tile.segments * tile.inner / tile.group
                                           : int64_t{tile.positions} * of_row / tile.inner);
  const int parts = tile.entry_rows * (tile.positions / tile.columns);
  // Few lanes, unless each had many entries.
  for (tile.team = 1; tile.team < 32 && 2 * tile.team * tile.columns <= threads && kTeamParts * tile.team < parts;) {
    tile.team *= 2;
  }
  if (passes && static_cast<int64_t>(tile.cluster) * tile.columns > kMostTileNumbers) return false;
  tile.exchanged = groups > 1 || tile.cluster > 1 || tile.positions > tile.columns;
  const int state = state_bytes(bytes);
  if (passes) {
    plan->schedule = Schedule::kTilePasses;
    plan->tile = tile;
    plan->edges = tile.spanning ? Edges::kNone : Edges::kParts;
    plan->threads = threads;
    plan->lanes = groups * tile.cluster;
    plan->packs = 0;
    plan->chunks = tile.cluster;
    plan->blocks = tiles * tile.cluster;
    plan->scratch = true;
    constexpr int kStageBytes = kTilePassStages * kTilePassPacks * kTilePassThreads * kPackBytes;
    static_assert(kStageBytes <= kSmallestDevice.shared_memory_per_block);
    plan->shared_bytes = std::max(kStageBytes, tile.entry_rows * tile.entries * state);
    return plan->shared_bytes <= device.shared_memory_per_block && plan->blocks <= kMostTileNumbers;
  }
  int64_t shared = static_cast<int64_t>(tile.held) * inputs * threads * kPackBytes;
  if (tile.exchanged) {
    const int64_t entries = ceil_div(state * tile.entry_rows * tile.entries, kPackBytes) * kPackBytes;
    const int64_t finals = kPackBytes * (tile.columns + ceil_div(tile.columns, width));
    // A cluster's barrier is between the entries and what is made of them, which takes their place.
    const bool clustered = tile.cluster > 1;
    tile.finals_at = clustered ? 0 : static_cast<int>(entries);
    tile.of_blocks_at = static_cast<int>(std::max(entries, finals));
    tile.received_at = tile.of_blocks_at + state * tile.cluster * tile.columns;
    shared += clustered ? tile.received_at + kPackBytes : entries + finals;
  }
  if (tile.turn) {
    tile.offsets_at = static_cast<int>(shared);
    shared += kOffsetBytes * tile.block_lines;
  }
  if (shared > device.shared_memory_per_block || tiles * tile.cluster > kMostTileNumbers) return false;
  plan->schedule = Schedule::kTile;
  plan->tile = tile;
  plan->edges = tile.spanning ? Edges::kNone : Edges::kParts;
  plan->cluster = tile.cluster;
  plan->threads = threads;
  plan->lanes = groups * tile.cluster;
  plan->packs = tile.held;
  plan->blocks = tiles * tile.cluster;
  plan->shared_bytes = static_cast<int>(shared);
  return true;
}

// By how much, as a logarithm, a shape of a tile takes longer than it must; fitted to the times that 22,000 shapes for
// 49 views took on an H200.
struct TileCosts {
  double room;                   // that is not used: a power of it
  double overhead;               // what a thread does besides its packs: a power of it, if it is worth
  double overhead_packs;         // so many packs
  double long_thread;            // a thread's way with many packs: for each 20 more
  double waiting;                // for the other blocks of a cluster: a power of their number
  double states;                 // that they exchange: for each thousand
  double apart;                  // lanes that share rows, but cannot add up first
  double narrow, rather_narrow;  // lines of 64 bytes, or up to 128
  double ragged;                 // sectors of which two tiles have a half each, divided by the packs of a line
  double segments;               // several to a block: a power of their number
  double block;                  // each block fewer at once than
  int enough_blocks;             // so many,
  double idle;                   // and threads, as a share of
  int enough_threads;            // so many
  int fewest_blocks;             // at once: shapes that allow no more are not considered
};
constexpr TileCosts kInterleavedCosts{
    0.3,   // room
    0.3,   // overhead
    2,     // overhead_packs
    0.2,   // long_thread
    0.15,  // waiting
    0,     // states
    0,     // apart
    0,     // narrow
    0,     // rather_narrow
    0,     // ragged
    0.05,  // segments
    0.04,  // block
    5,     // enough_blocks
    0.05,  // idle
    512,   // enough_threads
    3,     // fewest_blocks
};
constexpr TileCosts kLineCosts{
    0.3,   // room
    0.3,   // overhead
    6,     // overhead_packs
    0.05,  // long_thread
    0.02,  // waiting
    0.09,  // states
    0.02,  // apart
    0.2,   // narrow
    0.03,  // rather_narrow
    2,     // ragged
    0,     // segments
    0.12,  // block
    3,     // enough_blocks
    0.2,   // idle
    640,   // enough_threads
    2,     // fewest_blocks
};

// The most threads that a multiprocessor runs at once: table "Technical Specifications per Compute Capability" of the
// CUDA C++ Programming Guide.
constexpr int threads_together(int compute_capability) {
  if (compute_capability < 80) return 1024;
  const bool smaller = (compute_capability > 80 && compute_capability < 90) || compute_capability >= 110;
  return smaller ? 1536 : 2048;
}

// Finds the shape of a tile that costs least, of those that are offered.
class CheapestTile {
 public:
  CheapestTile(const TileCosts& costs, const Tile& tile, int bytes, int inputs, const Device& device)
      : costs_(costs), tile_(tile), bytes_(bytes), inputs_(inputs), device_(device) {
    for (int packs = 1; packs <= kMostHeldPacks; ++packs) {
      of_packs_[packs] = costs.overhead * std::log(1 + costs.overhead_packs / packs) +
                         costs.long_thread * std::max(0.0, packs / 20.0 - 1);
    }
  }

  // Whether a cluster of so many blocks, and so all larger ones, would cost more.
  bool too_many(int blocks) const { return costs_.waiting * std::log(blocks) >= least_; }

  // A tile of so many packs of each line of so many segments, for `blocks` and some groups of threads in each.
  void offer(CudaPlan* plan, int packs, int blocks, int64_t groups, int segments) {
    const int64_t lines = tile_.lines.elements();
    const int64_t held = ceil_div(ceil_div(lines, blocks), groups);
    if (held * inputs_ > kMostHeldPacks || segments * groups * packs > kTileThreads) return;
    const int threads = static_cast<int>(ceil_div(segments * groups * packs, 32) * 32);
    double cost = of_packs_[held * inputs_] + costs_.waiting * std::log(blocks);
    if (cost >= least_) return;
    cost += costs_.room * std::log(static_cast<double>(blocks) * threads * held / (lines * packs * segments));
    cost += costs_.segments * std::log(segments);
    cost += packs * kPackBytes <= 64 ? costs_.narrow : packs * kPackBytes <= 128 ? costs_.rather_narrow : 0;
    if (tile_.spanning && tile_.segment * bytes_ % kSectorBytes != 0) cost += costs_.ragged / packs;
    // Without what is exchanged yet.
    if (cost + of_blocks(held * inputs_ * threads * kPackBytes, threads) >= least_) return;
    CudaPlan shape = *plan;
    if (!lay_out(&shape, tile_, packs, static_cast<int>(groups), static_cast<int>(held), bytes_, inputs_,
                 static_cast<int>(segments * groups * packs), device_, blocks, false)) {
      return;
    }
    const Tile& tile = shape.tile;
    if (tile.segment_tiles > 0) {  // the packs that they read for the elements that they store
      const double read = static_cast<double>(tile.segment_tiles) * packs * kPackBytes;
      cost += costs_.room * std::log(read / (tile.segment * bytes_));
    }
    cost += costs_.states * shape.cluster * tile.columns / 1000;
    if (!tile.shuffled) cost += costs_.apart;
    cost += of_blocks(shape.shared_bytes, threads);
    if (cost >= least_) return;
    least_ = cost;
    best_ = shape;
  }

  bool found(CudaPlan* plan) const {
    if (least_ == HUGE_VAL) return false;
    *plan = best_;
    return true;
  }

 private:
  double of_blocks(int64_t shared_bytes, int threads) const {
    const int64_t blocks = std::min<int64_t>(device_.shared_memory_per_block / (shared_bytes + kReservedBytes),
                                             threads_together(device_.compute_capability) / threads);
    if (blocks < costs_.fewest_blocks) return HUGE_VAL;
    return costs_.block * std::max<int64_t>(0, costs_.enough_blocks - blocks) +
           costs_.idle * std::max(0.0, 1 - static_cast<double>(blocks * threads) / costs_.enough_threads);
  }

  const TileCosts& costs_;
  const Tile& tile_;
  const int bytes_, inputs_;
  const Device& device_;
  double of_packs_[kMostHeldPacks + 1];
  double least_ = HUGE_VAL;
  CudaPlan best_;
};

// A tile of parts of runs of interleaved rows, of `unit` packs.
bool choose_interleaved(CudaPlan* plan, const Tile& tile, int unit, int bytes, int inputs, const Device& device) {
  CheapestTile cheapest(kInterleavedCosts, tile, bytes, inputs, device);
  for (int blocks = 1; blocks <= device.largest_cluster && !cheapest.too_many(blocks); ++blocks) {
    const int64_t lines = ceil_div(tile.lines.elements(), blocks);
    for (int held = 1; held * inputs <= kMostHeldPacks; ++held) {
      const int64_t groups = ceil_div(lines, held);
      int segments = 0;
      for (const int threads : {64, 96, 128, 160, 192, kTileThreads}) {
        if (groups * unit > threads || segments == (blocks > 1 ? 1 : threads / (groups * unit))) continue;
        segments = blocks > 1 ? 1 : static_cast<int>(threads / (groups * unit));
        cheapest.offer(plan, unit, blocks, groups, segments);
      }
    }
  }
  return cheapest.found(plan);
}

// `packs`, or as few as hold a segment that begins anywhere in the first one.
int packs_of_part(const Tile& tile, int packs, int bytes) {
  while (packs > 2 && (packs / 2 - 1) * kPackBytes >= tile.segment * bytes) packs /= 2;
  return packs;
}

// A tile of lines of which each begins as the one `turn` lines on.
bool choose_lines(CudaPlan* plan, const Tile& tile, int turn, int bytes, int inputs, const Device& device) {
  CheapestTile cheapest(kLineCosts, tile, bytes, inputs, device);
  const int least_packs = tile.spanning ? 4 : packs_of_part(tile, 8, bytes);
  for (int blocks = 1; blocks <= device.largest_cluster && !cheapest.too_many(blocks); ++blocks) {
    for (int packs = least_packs; packs <= kTileThreads / turn; packs *= 2) {
      for (int groups = turn; groups * packs <= kTileThreads; groups *= 2) {
        if (groups * packs >= 64) cheapest.offer(plan, packs, blocks, groups, 1);
      }
    }
  }
  return cheapest.found(plan);
}

// Of ragged runs of which several are side by side, a shape is looked for if there are more lines of them than this, or
// if the runs are not so short, but have so few elements, at least as many.
constexpr int kFewShortRuns = 8;
constexpr int kRaggedRun = 64;
// Of runs that begin anywhere in a pack, at the least, where each is a set of lines.
constexpr int64_t kSetRunBytes = 512;

// The strips schedule.
constexpr int kStripLines[] = {4, 8, 16, 24, 32};  // that threads may have room for,
constexpr int kMostStripLines = 24;                // unless it is one operand of 16 bits, of which tiles take longer
constexpr int64_t kStripSegmentBytes = 128;        // of a segment, at the least
constexpr int kStripLineBytes = 4 << 10;           // of a line's part, at the most,
constexpr int kStripBytes = 44 << 10;              // and of those of all lines of all operands
constexpr int kStripTurns = 3;                     // of a block's threads at its columns, at the least, if so many
constexpr int64_t kStripThreadsAtOnce = 384;       // run on a multiprocessor

// Strips of few lines; false if there are more.
bool choose_strips(CudaPlan* plan, Tile tile, int bytes, int inputs, const Device& device) {
  const int64_t lines = tile.lines.elements();
  const int64_t most_lines = bytes == 2 && inputs == 1 ? *std::rbegin(kStripLines) : kMostStripLines;
  if (lines > most_lines || tile.segment * bytes < kStripSegmentBytes) return false;
  const int width = kPackBytes / bytes;
  const int held = *std::lower_bound(std::begin(kStripLines), std::end(kStripLines), lines);
  const int at_once = strip_columns(held, inputs);
  // Whole turns of 128 threads, as of most blocks, wherever a line begins in its first pack.
  const int64_t most_packs = std::min<int64_t>(kStripLineBytes, kStripBytes / lines / inputs) / kPackBytes;
  const int64_t turn = 128 * at_once, most = std::max(most_packs * width / turn, int64_t{1}) * turn;
  const int64_t columns = std::min(most, most_packs * width) - width + 1;
  tile.segment_tiles = static_cast<int>(ceil_div(tile.segment, columns));
  tile.width = static_cast<int>(ceil_div(tile.segment, tile.segment_tiles));
  tile.packs = static_cast<int>(ceil_div(tile.width + width - 1, width));
  tile.all_lines = static_cast<int>(lines);
  tile.tiles = tile.kept.elements() * tile.segment_tiles;
  if (tile.tiles > kMostTileNumbers) return false;
  plan->schedule = Schedule::kStrips;
  plan->tile = tile;
  plan->edges = Edges::kParts;
  plan->lanes = 1;
  plan->packs = held;
  // Threads have several columns one after another, and few of them none in the end.
  const int fewest_turns = std::max(kStripTurns, static_cast<int>(ceil_div(tile.width, at_once * kStripThreads)));
  double best_use = 0;
  for (int turns = fewest_turns; turns <= fewest_turns + kStripTurns; ++turns) {
    const int threads = static_cast<int>(ceil_div(tile.width, at_once * turns * 32) * 32);
    const double use = static_cast<double>(tile.width) / (ceil_div(tile.width, at_once * threads) * at_once * threads);
    if (threads <= kStripThreads && use > best_use) best_use = use, plan->threads = threads;
  }
  plan->blocks = tile.tiles;
  plan->shared_bytes = static_cast<int>(lines * tile.packs * kPackBytes * inputs);
  const int64_t blocks_at_once = device.shared_memory_per_block / (plan->shared_bytes + kReservedBytes);
  while (2 * plan->threads <= kStripThreads && plan->threads * blocks_at_once < kStripThreadsAtOnce) plan->threads *= 2;
  return true;
}

// A tile that holds rows, so that they are read once, or with `passes` one that does not; false if there is none, or
// if with `scratch` memory to read twice that takes less time.
bool choose_tile(CudaPlan* plan, const View& view, int bytes, int inputs, const Device& device, bool passes,
                 bool scratch) {
  const int width = kPackBytes / bytes, most_threads = passes ? kTilePassThreads : kTileThreads;
  const Dim& run = view.reduced.dim[view.reduced.size - 1];
  const Dim none{1, 1, 0};
  const Dim& kept = view.kept.size ? view.kept.dim[view.kept.size - 1] : none;
  const auto whole_strides = [&](const Dims& dims, int n) {
    return std::all_of(dims.dim, dims.dim + n, [&](const Dim& dim) { return dim.stride % width == 0; });
  };
  const int64_t most_held = kTileBytes / kPackBytes / most_threads / inputs;
  // Where entries take more room, so that as many blocks fit a multiprocessor.
  const int64_t fewer_held = most_held * 3 / 4;
  struct Shape {
    int64_t packs, groups;
  };
  // Tries numbers of lines a thread, the one that lets most blocks run at once first, and cluster sizes, until a tile
  // of the shape that shape_of(lines a thread) says fits.
  const auto shape_fits = [&](const Tile& tile, Shape shape, int64_t held, int most_blocks) {
    return tile.lines.elements() <= kMostTileNumbers &&
           lay_out(plan, tile, static_cast<int>(shape.packs), static_cast<int>(shape.groups), static_cast<int>(held),
                   bytes, inputs, most_threads, device, std::min(most_blocks, device.largest_cluster), passes);
  };
  // As many groups as it takes to hold all lines, of at least so many packs, a multiple of `unit`.
  const auto wide_shape = [&](const Tile& tile, int64_t least_packs, int64_t held, auto groups_of, int64_t unit = 1) {
    int64_t groups = 1;
    while (groups * held < tile.lines.elements() && 2 * groups * least_packs <= most_threads) groups *= 2;
    groups = groups_of(groups);
    return Shape{most_threads / groups / unit * unit, groups};
  };
  const auto try_all = [&](const Tile& tile, int64_t first_held, auto shape_of) {
    const auto fits = [&](int64_t held, int most_blocks) {
      return shape_fits(tile, shape_of(held), held, most_blocks);
    };
    // A little more, where that lets fewer blocks wait for one another and entries take no room.
    const int64_t more_held = tile.separate ? first_held : 9 * most_held / 8;
    for (const int most_blocks : {8, device.largest_cluster}) {
      if (fits(first_held, most_blocks) || fits(more_held, most_blocks)) return true;
    }
    for (const int64_t held :
         {most_held, 5 * most_held / 4, 3 * most_held / 2, 2 * most_held, 13 * most_held / 4, fewer_held}) {
      if (fits(held, 8) || fits(held, device.largest_cluster)) return true;
    }
    return false;
  };
  // Of as many threads as possible, at least so many packs wide, a multiple of `unit`.
  const auto try_shapes = [&](const Tile& tile, int unit, int least_packs, auto groups_of) {
    const int64_t lines = tile.lines.elements();
    // A thread that has all lines of its rows need not ask others.
    if (!passes && tile.spanning && lines <= 2 * most_held && 2 * least_packs <= most_threads &&
        shape_fits(tile, {most_threads / 2 / unit * unit, 1}, 2 * most_held, 1)) {
      return true;
    }
    return try_all(tile, tile.spanning || tile.inner == 1 ? most_held : fewer_held,
                   [&](int64_t held) { return wide_shape(tile, least_packs, held, groups_of, unit); });
  };
  const auto same = [](int64_t groups) { return groups; };
  // At least as many groups as it takes for a thread's lines to begin alike in a pack.
  const auto alike = [&](const Dims& lines) {
    return [&, turn = turn_of(width, lines.dim[lines.size - 1].stride)](int64_t groups) {
      return std::max<int64_t>(groups, std::min<int64_t>(turn, lines.elements()));
    };
  };

  // Runs of lines of `period` elements, `group` of each row side by side.
  const auto unit_of = [&](int64_t period) { return std::lcm<int64_t>(period, width) / width; };  // packs
  const auto are_runs = [&](const Dim& along, int64_t period) {
    return along.stride == period && unit_of(period) <= most_threads / 2 && along.extent <= kMostTileNumbers / period;
  };
  const auto try_runs = [&](Tile tile, int64_t period, int64_t group, int64_t inner_mask) {
    Dim& along = tile.lines.dim[tile.lines.size - 1];
    if (!are_runs(along, period) || !whole_strides(tile.lines, tile.lines.size - 1)) return false;
    const int64_t unit = unit_of(period);
    tile.separate = true;
    tile.inner = period;
    tile.group = group;
    tile.outer_mask = along.mask_stride;
    tile.inner_mask = inner_mask;
    tile.run = along.extent * period;
    tile.segment = unit * width;
    const bool aligned =
        tile.run % width == 0 && whole_strides(tile.kept, tile.kept.size) && whole_strides(tile.sets, tile.sets.size);
    const int64_t run_packs = aligned ? tile.run / width : ceil_div(tile.run + width - 1, width);
    along = Dim{ceil_div(run_packs, unit), tile.segment, 0};
    if (!passes && choose_interleaved(plan, tile, static_cast<int>(unit), bytes, inputs, device)) return true;
    return try_all(tile, fewer_held, [&](int64_t held) {
      return Shape{unit, std::min<int64_t>(most_threads / unit, ceil_div(tile.lines.elements(), held))};
    });
  };
  // Lines of several dimensions, cut into sets of one, where states take less room than what they are of.
  const auto has_sets = [&](const Dims& lines) {
    return lines.size > 1 && lines.dim[lines.size - 1].extent * bytes >= 2 * state_bytes(bytes);
  };
  // Whether lines of few bytes had better be read twice, in whole runs, than once, one by one.
  const auto better_twice = [&](const Dims& lines, int64_t period, int64_t line_bytes) {
    const Dim& along = lines.dim[lines.size - 1];
    return scratch && !passes && line_bytes < kStripSegmentBytes && are_runs(along, period) &&
           along.extent * period * bytes >= kSetRunBytes && (whole_strides(lines, lines.size - 1) || has_sets(lines));
  };
  const auto in_sets = [&](Tile tile) {
    tile.sets = without_last(tile.lines);
    tile.lines.dim[0] = tile.lines.dim[tile.lines.size - 1];
    tile.lines.size = 1;
    return tile;
  };

  Tile tile{};
  tile.inner = tile.group = 1;
  if (view.minor_reduced) {
    const bool neighbours = view.kept.size && kept.stride == run.extent;
    tile.kept = without_last(view.kept);
    tile.lines = without_last(view.reduced);
    if (neighbours && run.extent <= most_threads * width && kept.extent <= kMostTileNumbers / run.extent) {
      tile.segment = kept.extent * run.extent;
      tile.inner = run.extent;
      tile.outer_mask = kept.mask_stride;
      tile.inner_mask = run.mask_stride;
      tile.spanning = tile.segment % width == 0 && whole_strides(tile.lines, tile.lines.size) &&
                      whole_strides(tile.kept, tile.kept.size);
      tile.separate = !tile.spanning || run.extent % width != 0;
      if (!tile.spanning && tile.lines.size > 0 && kept.mask_stride == run.extent * run.mask_stride) {
        const bool sets = has_sets(tile.lines) && !whole_strides(tile.lines, tile.lines.size - 1);
        if (try_runs(passes && sets ? in_sets(tile) : tile, tile.segment, run.extent, run.mask_stride)) return true;
        if (better_twice(tile.lines, tile.segment, run.extent * bytes)) return false;
      }
      const int unit = tile.spanning ? static_cast<int>(unit_of(run.extent)) : 1;
      const int least = std::max(unit, kTileLineBytes / kPackBytes);
      // Of longer ragged runs a tile would read much at its edges for others.
      const bool short_runs = ceil_div(run.extent + width - 1, width) <= least && tile.lines.size == 1;
      const int64_t lines = tile.lines.elements();
      if (!tile.spanning && !passes && tile.lines.size == 1 &&
          (short_runs ? lines > kFewShortRuns : run.extent <= kRaggedRun && lines >= kRaggedRun)) {
        const int turn = static_cast<int>(turn_of(width, tile.lines.dim[0].stride));
        if (choose_lines(plan, tile, turn, bytes, inputs, device)) return true;
      }
      // What is read twice needs no room: wider lines, where there are any.
      const int wider = passes && tile.segment >= 2 * least * width ? 2 * least : least;
      if (tile.spanning ? least <= most_threads && try_shapes(tile, unit, wider, same)
                        : short_runs && try_shapes(tile, 1, least, alike(tile.lines))) {
        return true;
      }
      if (scratch && !passes && tile.spanning && run.extent * bytes < kSectorBytes) return false;  // as better_twice
    }
    // A row to a block, or to a cluster.
    tile.kept = view.kept;
    tile.spanning = tile.separate = false;
    tile.inner = 1;
    tile.run = run.extent;
    tile.outer_mask = run.mask_stride;
    tile.inner_mask = 0;
    const bool aligned = run.extent % width == 0 && whole_strides(view.kept, view.kept.size) &&
                         whole_strides(tile.lines, tile.lines.size);
    const int64_t run_packs = aligned ? run.extent / width : ceil_div(run.extent + width - 1, width);
    int64_t best = 1;
    double best_use = 0;  // by how many places most threads have most to do
    const int64_t widest = std::min<int64_t>(aligned ? most_threads : kMostRaggedPacks,
                                             ceil_div(run_packs, kPacksAddedUp) * kPacksAddedUp);
    for (int64_t packs = widest; packs > 0; --packs) {
      const int64_t groups = most_threads / packs;
      double use = static_cast<double>(run_packs) / (ceil_div(run_packs, packs) * packs) * (packs * groups) /
                   (ceil_div(packs * groups, 32) * 32);
      if (packs % kPacksAddedUp != 0) use *= kAddedUpAlone;
      if (use > best_use * 1.02) best_use = use, best = packs;
    }
    tile.segment = best * width;
    tile.lines.dim[tile.lines.size++] = Dim{ceil_div(run_packs, best), tile.segment, 0};
    if (run.extent > kMostTileNumbers) return false;
    return try_all(tile, most_held, [&](int64_t held) {
      return Shape{best, std::min<int64_t>(most_threads / best, ceil_div(tile.lines.elements(), held))};
    });
  }

  tile.kept = without_last(view.kept);
  tile.lines = view.reduced;
  tile.separate = true;
  tile.segment = kept.extent;
  tile.outer_mask = kept.mask_stride;
  if (kept.extent > kMostTileNumbers) return false;
  if (kept.extent % width == 0 && kept.extent * bytes >= kSegmentBytes && whole_strides(tile.lines, tile.lines.size) &&
      whole_strides(tile.kept, tile.kept.size)) {
    tile.spanning = true;
    const int64_t lines = tile.lines.elements();
    const int packs = kTileLineBytes / kPackBytes;
    if (!passes && lines > 2 * most_held && lines <= kMostTileNumbers &&
        choose_lines(plan, tile, 1, bytes, inputs, device)) {
      return true;
    }
    const bool wide = tile.segment >= 4 * packs * width;
    return try_shapes(tile, 1, !passes ? packs : wide ? 4 * packs : 2 * packs, same);
  }
  if (passes && has_sets(tile.lines) &&
      !(are_runs(run, kept.extent) && whole_strides(tile.lines, tile.lines.size - 1))) {
    tile = in_sets(tile);
  }
  if (try_runs(tile, kept.extent, 1, kept.mask_stride)) return true;
  if (better_twice(tile.lines, kept.extent, kept.extent * bytes)) return false;
  if (run.extent > kMostTileNumbers) return false;
  if (!passes && choose_strips(plan, tile, bytes, inputs, device)) return true;
  if (passes && tile.lines.size > 1) return false;
  const int turn = static_cast<int>(turn_of(width, run.stride));
  if (tile.lines.size > 1) {
    tile.turn = turn;
    tile.last_lines = static_cast<int>(run.extent);
    tile.lines.dim[tile.lines.size - 1].extent = ceil_div(run.extent, turn) * turn;
  }
  if (!passes && choose_lines(plan, tile, turn, bytes, inputs, device)) return true;
  return try_shapes(tile, 1, packs_of_part(tile, passes ? 16 : 8, bytes), alike(tile.lines));
}

// Whether a tile on a chip with clusters takes longer than reading it twice would: its block has a multiprocessor for
// itself and nothing to do while it waits. Parts of runs of interleaved rows wait less, unless for many blocks.
bool waits(const CudaPlan& plan, int bytes) {
  const bool alone = plan.shared_bytes > kLonelyTileBytes;
  if (!plan.tile.run || !plan.tile.separate) return alone;
  return alone ? plan.cluster >= kMostBlocks / 2 : plan.cluster == kMostBlocks && bytes < 8;
}

// All that a tile is chosen by, but for the device.
std::vector<int64_t> key_of(const View& view, int bytes, int inputs) {
  std::vector<int64_t> key{bytes, inputs, view.minor_reduced, view.kept.size, view.reduced.size};
  for (const Dims* dims : {&view.kept, &view.reduced}) {
    for (int i = 0; i < dims->size; ++i) {
      key.insert(key.end(), {dims->dim[i].extent, dims->dim[i].stride, dims->dim[i].mask_stride});
    }
  }
  return key;
}

}  // namespace

// Choosing takes up to some ten microseconds, as long as a small call itself: what was chosen is kept.
bool plan_tile(CudaPlan* plan, const View& view, int bytes, int inputs, const Device& device, bool scratch) {
  struct Result {
    bool fits;
    CudaPlan plan;
  };
  static auto& kept = *new Kept<Result>;  // never destroyed: threads may outlive static objects
  std::vector<int64_t> key = key_of(view, bytes, inputs);
  key.insert(key.end(), {scratch, device.compute_capability, device.multiprocessors, device.shared_memory_per_block,
                         device.largest_cluster});
  const Result result = kept.get(key, [&] {
    CudaPlan once{}, twice{};  // as often as rows are read
    once.cluster = twice.cluster = 1;
    const bool fits = choose_tile(&once, view, bytes, inputs, device, false, scratch);
    const bool lonely = fits && device.largest_cluster > 1 && waits(once, bytes);
    if (scratch && (!fits || lonely) && choose_tile(&twice, view, bytes, inputs, device, true, true)) {
      return Result{true, twice};
    }
    return Result{fits || choose_tile(&once, view, bytes, inputs, device, false, false), once};
  });
  if (result.fits) *plan = result.plan;
  return result.fits;
}

int64_t tile_scratch_bytes(const View& view, int bytes, int inputs) {
  static auto& kept = *new Kept<int64_t>;
  return kept.get(key_of(view, bytes, inputs), [&]() -> int64_t {
    CudaPlan plan{};
    if (choose_tile(&plan, view, bytes, inputs, kSmallestDevice, false, true)) return 0;
    if (!choose_tile(&plan, view, bytes, inputs, kSmallestDevice, true, true)) return 0;
    return plan.tile.tiles * plan.tile.cluster * plan.tile.columns * state_bytes(bytes);
  });
}

}  // namespace jax_softmax
