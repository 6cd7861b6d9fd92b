#include "tile_shape.h"

#include <algorithm>
#include <cmath>

namespace jax_softmax {
namespace {

constexpr int kTeamParts = 8;
constexpr int kMostTilePieces = 256;
constexpr int kMostHeldPacks = 40;       // of a thread, where a shape is looked for
constexpr int kReservedBytes = 1 << 10;  // of shared memory, for each block
constexpr int64_t kPieceLines = 64;      // of a thread, at the least

// The strips schedule.
constexpr int kStripHeld[] = {4, 8, 16, 24, 32};  // elements of a row that threads may have room for,
constexpr int kMostStripHeld = 24;                // at the most, unless a row of one operand of 16 bits is a thread's.
constexpr int kMostArrayColumns = 256;            // Of a row of small arrays,
constexpr int kMostRunColumns = 192;              // where it is made of runs,
constexpr int kMostTurnedColumns = 72;            // of elements of 16 bits in lines that would take turns in a tile,
constexpr int kMostHalfColumns = 48;              // or of those of one operand; of others, as many as a thread holds
constexpr int kStripLineBytes = 4 << 10;          // of a line's part, at the most,
constexpr int kStripArraysBytes = 32 << 10;       // unless it is of whole arrays, and then of those of all operands,
constexpr int kStripBytes = 44 << 10;             // and of those of all lines of all operands
constexpr int kStripTurns = 3;                    // of a block's threads at its rows, at the least, if so many
constexpr int64_t kStripThreadsAtOnce = 384;      // run on a multiprocessor,
constexpr int kTeamStripTurns = 2;                // where several threads have a row

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

}  // namespace

bool lay_out(CudaPlan* plan, Tile tile, int packs, int groups, int held, int bytes, int inputs, int most_threads,
             const Device& device, int most_blocks, bool passes) {
  const int width = kPackBytes / bytes;
  const int64_t all_lines = tile.lines.elements(), outer = tile.kept.elements();
  if (packs < 1 || packs * groups > most_threads) return false;
  tile.packs = packs;
  tile.groups = groups;
  tile.all_lines = static_cast<int>(all_lines);
  const int64_t sets = tile.sets.elements();
  if (sets == 1) tile.full_sets = 1;
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
      int64_t inside = 1, outermost = 0;
      for (int i = 0; i < tile.sets.size; ++i) outermost = std::max(outermost, tile.sets.dim[i].stride);
      for (int i = 0; i < tile.kept.size; ++i) {
        if (tile.kept.dim[i].stride < outermost) inside *= tile.kept.dim[i].extent;
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

int packs_of_part(const Tile& tile, int packs, int bytes) {
  while (packs > 2 && (packs / 2 - 1) * kPackBytes >= tile.segment * bytes) packs /= 2;
  return packs;
}

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

bool choose_strips(CudaPlan* plan, Tile tile, int bytes, int inputs, const Device& device) {
  const int64_t lines = tile.lines.elements(), columns = lines * tile.inner;
  const bool arrays = lines == 1, runs = tile.inner > 1, half = bytes == 2, one_half = half && inputs == 1;
  const int most_columns = arrays                        ? kMostArrayColumns
                           : runs                        ? kMostRunColumns
                           : half && tile.lines.size > 1 ? kMostTurnedColumns
                           : one_half                    ? kMostHalfColumns
                                                         : kMostStripHeld;
  if (columns > most_columns || (runs && lines * inputs > kMostStripHeld)) return false;
  if (!arrays && tile.segment * bytes < kStripSegmentBytes) return false;
  tile.team = 1;
  if (!one_half || columns > *std::rbegin(kStripHeld)) {
    while (tile.team * kMostStripHeld < columns) tile.team *= 2;
  }
  tile.held = static_cast<int>(ceil_div(columns, tile.team));
  const int width = kPackBytes / bytes;
  const int held = *std::lower_bound(std::begin(kStripHeld), std::end(kStripHeld), tile.held);
  const int at_once = strip_columns(held, inputs);
  const int64_t most_bytes = arrays ? kStripArraysBytes / inputs : kStripLineBytes;
  const int64_t room = std::min<int64_t>(most_bytes, kStripBytes / lines / inputs) / kPackBytes * width;
  // As many units as fit wherever a line begins in its first pack, in whole turns of 128 threads, as of most blocks.
  const int64_t turn = std::max<int64_t>(128 * at_once / tile.team / tile.columns, 1);
  const int64_t fit = (room - width + 1) / tile.unit, whole = room / tile.unit / turn * turn;
  const int64_t units = whole > 0 ? std::min(fit, whole) : fit;
  if (units <= 0) return false;
  tile.segment_units = tile.segment / tile.unit;
  tile.segment_tiles = static_cast<int>(ceil_div(tile.segment_units, units));
  tile.width = static_cast<int>(ceil_div(tile.segment_units, tile.segment_tiles));
  tile.packs = static_cast<int>(ceil_div(int64_t{tile.width} * tile.unit + width - 1, width));
  tile.all_lines = static_cast<int>(lines);
  tile.tiles = tile.kept.elements() * tile.segment_tiles;
  if (tile.tiles > kMostTileNumbers) return false;
  plan->schedule = Schedule::kStrips;
  plan->tile = tile;
  plan->edges = Edges::kParts;
  plan->lanes = tile.team;
  plan->packs = held;
  // Threads have several columns one after another, and few of them none in the end.
  const int64_t threads_of_one = ceil_div(int64_t{tile.width} * tile.columns * tile.team, at_once);  // in one turn
  const int64_t least_turns = tile.team == 1 ? kStripTurns : kTeamStripTurns;
  const int fewest_turns = static_cast<int>(std::max(least_turns, ceil_div(threads_of_one, kStripThreads)));
  double best_use = 0;
  for (int turns = fewest_turns; turns <= fewest_turns + kStripTurns; ++turns) {
    const int64_t threads = ceil_div(threads_of_one, turns * 32) * 32;
    const double use = static_cast<double>(threads_of_one) / (ceil_div(threads_of_one, threads) * threads);
    if (threads <= kStripThreads && use > best_use) best_use = use, plan->threads = static_cast<int>(threads);
  }
  plan->blocks = tile.tiles;
  const int64_t tables = tile.team * (held + kStripSpare) * (sizeof(int) + sizeof(int64_t)) + lines * sizeof(int64_t);
  plan->shared_bytes = static_cast<int>(lines * tile.packs * kPackBytes * inputs + tables);
  const int64_t blocks_at_once = device.shared_memory_per_block / (plan->shared_bytes + kReservedBytes);
  while (2 * plan->threads <= kStripThreads && plan->threads * blocks_at_once < kStripThreadsAtOnce) plan->threads *= 2;
  return true;
}

}  // namespace jax_softmax
