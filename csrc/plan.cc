#include "plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>

namespace jax_softmax {

std::string make_view(const int64_t* shape, const int64_t* mask_shape, int rank, const int64_t* axes, int n_axes,
                      View* view) {
  if (rank > kMaxDims) {
    return "arrays of more than " + std::to_string(kMaxDims) + " dimensions are not supported, got " +
           std::to_string(rank);
  }
  bool is_reduced[kMaxDims] = {};
  for (int i = 0; i < n_axes; ++i) {
    if (axes[i] < 0 || axes[i] >= rank || is_reduced[axes[i]]) {
      return "axes must be distinct numbers from 0 to " + std::to_string(rank - 1) + ", got " + std::to_string(axes[i]);
    }
    is_reduced[axes[i]] = true;
  }
  if (mask_shape) {
    for (int i = 0; i < rank; ++i) {
      if (mask_shape[i] != 1 && mask_shape[i] != shape[i]) {
        return "dimension " + std::to_string(i) + " of the mask must be 1 or " + std::to_string(shape[i]) + ", got " +
               std::to_string(mask_shape[i]);
      }
    }
  }

  Dim dims[kMaxDims];
  bool reduced[kMaxDims];
  int first = rank;  // dims[first, rank) are the canonical dimensions, filled from the innermost outwards
  int64_t stride = 1, mask_stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    const int64_t extent = shape[i];
    const bool in_mask = mask_shape && mask_shape[i] != 1;
    const Dim dim{extent, stride, in_mask ? mask_stride : 0};
    stride *= extent;
    if (in_mask) mask_stride *= extent;
    if (extent == 1) continue;
    if (first < rank && reduced[first] == is_reduced[i] &&
        dim.mask_stride == dims[first].mask_stride * dims[first].extent) {
      dims[first].extent *= extent;
    } else {
      dims[--first] = dim;
      reduced[first] = is_reduced[i];
    }
  }

  *view = View{};
  view->masked = mask_shape != nullptr;
  view->minor_reduced = true;
  for (int i = first; i < rank; ++i) {
    Dims& role = reduced[i] ? view->reduced : view->kept;
    role.dim[role.size++] = dims[i];
    view->minor_reduced = reduced[i];
  }
  if (view->reduced.size == 0) {  // a softmax over single elements
    view->reduced.dim[view->reduced.size++] = Dim{1, 1, 0};
    view->minor_reduced = true;
  }
  view->rows = view->kept.elements();
  view->columns = view->reduced.elements();
  return {};
}

namespace {

constexpr int kPackBytes = 16;
constexpr int kLinePacks = 128 / kPackBytes;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads of a block whose lanes share rows, at the most, and the packs of all operands that several warps of them
// have.
constexpr int kLanesThreads = 128;
constexpr int kLanesBlockPacks = 256;
struct LanesAndPacks {
  int lanes, packs;
};
// Several packs a lane, so that enough is under way where not all lanes have one.
constexpr LanesAndPacks kSpread[] = {{1, 1},  {2, 1},  {4, 1},  {4, 2},  {4, 3},  {8, 2},  {8, 3}, {16, 2},
                                     {16, 3}, {32, 2}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
constexpr LanesAndPacks kSharing[] = {{1, 1},  {2, 1},  {4, 1},  {4, 2},  {8, 2},  {8, 3},  {16, 2}, {16, 3},
                                      {32, 2}, {16, 5}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
// The most packs that a warp, and a block, hold in registers without a spill. Of one operand of float64, whose
// exponential is long, registers let more be under way than shared memory does.
constexpr int kWarpPacks = 8 * 32;
constexpr int kBlockPacks = 4 * 256;
constexpr int kLongBlockPacks = 8 * 256;  // where there are no edges and no mask
constexpr int kFloat64BlockPacks = 8 * 512;
// About what the blocks of a multiprocessor have under way of rows in registers, if each has much: memory is faster for
// it. They ask for shared memory that they do not use so that no more of them fit, and for no more than that takes,
// since the rest is the first cache's, through which loads go.
constexpr int64_t kBlockBytesAtOnce = 64 << 10;
constexpr int64_t kLargeBlockBytes = 16 << 10;
// Smaller blocks, if all of their threads have as much to do, have a warp more than they need, to the same end.
constexpr int64_t kSmallBlockBytes = 6 << 10;
// Static shared memory of the chunks and ring schedules, rounded up.
constexpr int kChunksStaticBytes = 3 << 10;
// Up to so many chunks for each multiprocessor are spread one to a block: a call that ends sooner than a ring fills.
// All of these blocks run at once, so that they may wait for one another.
constexpr int kFewChunks = 8;
// Fewer chunks than that, of a row that a small cluster can hold, leave room for one to a multiprocessor.
constexpr int kSmallCluster = 8;
// Rows of more chunks are waited for by two warps, in turns: of an even number of stages, so that the same one waits
// for all that passes through a stage.
constexpr int kLongRing = 64;
// A warp that waits for a stage must know that what was there before has been copied: it has waited for that itself, or
// for something that was copied no sooner than kRingCopies later.
constexpr int kFewestStages = 6;
static_assert(kFewestStages % kRingSummers == 0 && kFewestStages + 1 >= kRingSummers + kRingCopies);
// The passes schedule: bytes of a row's piece, and the most pieces.
constexpr int64_t kPieceBytes = 64 << 10;
constexpr int kMostPieces = 512;
// A ring may read one in so many of a row's chunks twice. Beyond that it is faster to read all of them twice, as it is
// sooner if the sum needs one of two operands alone (ops.h's kFirstSummed).
constexpr int kAgainOfChunks = 2;
constexpr int kAgainOfChunksIfSummedAlone = 8;
// The most chunks of a row that are exchanged.
constexpr int kMostChunks = 8192;
// A block of any chip has room for so many chunks.
constexpr int kFewestChunks = 3;
// The slab schedule: the longest row, and about how large a slab is to be.
constexpr int kSlabColumns = 512;
constexpr int kSlabBytes = 17 << 9;         // of one operand: 8 KB, or a little more
constexpr int kSlabBytesAtMost = 12 << 10;  // where fewer threads help
// Of all operands, where lanes have pairs of elements, in two turns or more; twice that if it takes logarithms.
constexpr int kPairsSlabBytes = 25 << 9;
constexpr int kFewColumns = 34;             // that one or two lanes have
constexpr int kNarrowSlabBytes = 16 << 10;  // of interleaved rows, of all operands
constexpr int kNarrowBytes = 8 << 10;       // of those neighbouring rows
constexpr int kNarrowUnitBytes = 40 << 10;  // of as many as are whole packs: what every chip has without asking

// Of a segment that is seen as a line of its own.
constexpr int kSegmentBytes = 32;

// How many turns shared memory takes to serve a warp that reads, of rows so many apart, an element in each of the lanes
// that share one, or a pair of elements.
int bank_turns(int64_t columns, int bytes, int lanes, bool pairs, int apart) {
  constexpr int kBanks = 32, kBankBytes = 4;
  int64_t word[kBanks][32];
  int words[kBanks] = {}, turns = 0;
  for (int thread = 0; thread < 32; ++thread) {
    const int64_t first = thread / lanes * apart * columns, lane = thread % lanes;
    const int64_t at = pairs ? ceil_div(first, 2) + lane : (first + lane) * bytes / kBankBytes;
    const int bank = static_cast<int>(at % kBanks);
    if (std::find(word[bank], word[bank] + words[bank], at) == word[bank] + words[bank]) word[bank][words[bank]++] = at;
    turns = std::max(turns, words[bank]);
  }
  return turns;
}

// A power of 2: how many rows apart those are to be of whose pairs a warp reads, for the fewest turns.
int slab_spread(int64_t columns, int lanes, int rows) {
  const int teams = 32 / lanes;
  int best = 1, least = bank_turns(columns, 2, lanes, true, 1);
  for (int apart = 2; least > 1 && rows % (teams * apart) == 0; apart *= 2) {
    const int turns = bank_turns(columns, 2, lanes, true, apart);
    if (turns < least) least = turns, best = apart;
  }
  return best;
}

// Lanes that share a row of a slab, and elements that each has room for: few lanes, unless their rows lie so that they
// keep one another waiting and cannot be spread.
LanesAndPacks slab_shape(int64_t columns, int bytes, bool pairs, int inputs) {
  constexpr int kOne[] = {3, 7, 15, 23, 31}, kMore[] = {9, 12, 16}, kPairs[] = {10, 12, 16, 20, 24, 32};
  const auto least = [](const auto& held, int64_t n) { return *std::lower_bound(std::begin(held), std::end(held), n); };
  if (columns <= (bytes == 8 ? 23 : 31)) return {1, least(kOne, columns)};
  if (columns <= kFewColumns) return {2, 17};
  if (pairs) {
    const int64_t in_pairs = columns / 2 * 2;  // an element that is left has room of its own
    const int most = in_pairs <= 64 || inputs == 2 ? 16 : 32;
    int lanes = 4;
    while (lanes * most < in_pairs) lanes *= 2;
    return {lanes, least(kPairs, 2 * ceil_div(in_pairs / 2, lanes))};
  }
  const int least_lanes = columns <= 64 ? 4 : columns <= 128 ? 8 : columns <= 256 ? 16 : 32;
  const int lanes = least_lanes < 16 && bank_turns(columns, bytes, least_lanes, false, 1) > 1 ? 16 : least_lanes;
  const int64_t held = ceil_div(columns, lanes);
  return {lanes, lanes == 16 && held <= 5 ? 5 : least(kMore, held)};
}

LanesAndPacks narrow_slab_shape(int64_t columns) {
  if (columns <= 4) return {1, 4};
  if (columns <= 16) return {1, 16};
  return {columns <= 64 ? 4 : columns <= 256 ? 16 : 32, 16};
}

// Cuts a row into equal parts of at most so many packs.
void cut(CudaPlan* plan, int64_t packs, int64_t most) {
  plan->chunks = static_cast<int>(ceil_div(packs, most));
  plan->share = ceil_div(packs, plan->chunks);
}

// Packs of each operand that a chunk has room for.
constexpr int chunk_room(int inputs, Edges edges) { return chunk_threads(inputs, edges) * chunk_packs(inputs, edges); }

// The most chunks of a row of so many packs.
int64_t most_chunks(int64_t packs, int inputs, Edges edges) {
  const int64_t chunks = ceil_div(packs, chunk_room(inputs, edges));
  // For a cluster, a multiple of what a block has, so that few blocks have fewer.
  return inputs == 2 && chunks > kMostTeams ? ceil_div(chunks, kMostTeams) * kMostTeams : chunks;
}

// Into whole lines of the last cache, where rows are.
void cut_into_chunks(CudaPlan* plan, int64_t packs, int inputs, Edges edges) {
  plan->share = ceil_div(ceil_div(packs, most_chunks(packs, inputs, edges)), kLinePacks) * kLinePacks;
  plan->chunks = static_cast<int>(ceil_div(packs, plan->share));
}

int64_t piece_packs(int64_t packs, int inputs) {
  return std::max(ceil_div(packs, kMostPieces), kPieceBytes / kPackBytes / inputs);
}

Dims without_last(Dims dims) {
  --dims.size;
  return dims;
}

// The tile schedule: bytes of a block's tile, and of a line in it at the least.
constexpr int kTileBytes = 64 << 10;
constexpr int kTileLineBytes = 64;
constexpr int kTeamParts = 8;
// On chips with clusters, a block with more has a multiprocessor for itself, and takes longer to read its lines once
// than others to read them twice, unless they are parts of runs.
constexpr int kLonelyTileBytes = 112 << 10;
// Where a tile fits that, some tile fits every chip, and needs no scratch memory.
constexpr Device kSmallestDevice{75, 1, 64 << 10, 1};
constexpr int kMostTilePieces = 256;
constexpr int kMostHeldPacks = 40;         // of a thread, where a shape is looked for
constexpr int kReservedBytes = 1 << 10;    // of shared memory, for each block
constexpr int kThreadsTogether = 2048;     // on a multiprocessor
constexpr int64_t kPieceLines = 64;        // of a thread, at the least
constexpr int kMostTileNumbers = 1 << 30;  // packs, lines, positions that are counted in 32 bits

// Lines so many apart begin alike in a pack.
int64_t turn_of(int width, int64_t stride) { return width / std::gcd<int64_t>(width, stride); }

// Plans a tile of `packs` of each line in `groups` of lines, with some lines to a thread; false if that is too large.
bool plan_tile(CudaPlan* plan, Tile tile, int packs, int groups, int held, int bytes, int inputs, int most_threads,
               const Device& device, int most_blocks, bool passes) {
  const int width = kPackBytes / bytes;
  const int64_t all_lines = tile.lines.elements(), outer = tile.kept.elements();
  if (packs < 1 || packs * groups > most_threads) return false;
  tile.packs = packs;
  tile.groups = groups;
  tile.all_lines = static_cast<int>(all_lines);
  if (passes) {
    tile.cluster = static_cast<int>(std::clamp<int64_t>(all_lines / groups / kPieceLines, 2, kMostTilePieces));
  } else {
    tile.cluster = static_cast<int>(ceil_div(all_lines, static_cast<int64_t>(groups) * held));
    if (tile.cluster > most_blocks) return false;
  }
  tile.block_lines = static_cast<int>(ceil_div(all_lines, tile.cluster));
  tile.cluster = static_cast<int>(ceil_div(all_lines, tile.block_lines));
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
    tile.segments = tile.cluster == 1 ? std::max(1, most_threads / (packs * groups)) : 1;
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
  tile.columns =
      tile.run ? static_cast<int>(tile.segments * tile.inner) : static_cast<int>(tile.positions * of_row / tile.inner);
  const int parts = tile.entry_rows * (tile.positions / tile.columns);
  // Few lanes, unless each had many entries.
  for (tile.team = 1; tile.team < 32 && 2 * tile.team * tile.columns <= threads && kTeamParts * tile.team < parts;) {
    tile.team *= 2;
  }
  tile.exchanged = groups > 1 || tile.cluster > 1 || tile.positions > tile.columns;
  const int state = 2 * std::max(bytes, 4);
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
  double rest;                   // what a thread does besides its packs: a power of it, if it is worth
  double rest_packs;             // so many packs
  double alone;                  // a thread's way with many packs: for each 20 more
  double waiting;                // for the other blocks of a cluster: a power of their number
  double states;                 // that they exchange: for each thousand
  double apart;                  // lanes that share rows, but cannot add up first
  double narrow, rather_narrow;  // lines of 64 bytes, or up to 128
  double ragged;                 // sectors of which two tiles have a half each, divided by the packs of a line
  double slabs;                  // several to a block: a power of their number
  double pauses;                 // of each block fewer at once than
  int enough_blocks;             // so many,
  double idle;                   // and of threads, as a share of
  int enough_threads;            // so many
  int fewest_blocks;             // at once: shapes that allow no more are not considered
};
constexpr TileCosts kSlabCosts{0.3, 0.3, 2, 0.2, 0.15, 0, 0, 0, 0, 0, 0.05, 0.04, 5, 0.05, 512, 3};
constexpr TileCosts kLineCosts{0.3, 0.3, 6, 0.05, 0.02, 0.09, 0.02, 0.2, 0.03, 2, 0, 0.12, 3, 0.2, 640, 2};

// Finds the shape of a tile that costs least, of those that are offered.
class CheapestTile {
 public:
  CheapestTile(const TileCosts& costs, const Tile& tile, int bytes, int inputs, const Device& device)
      : costs_(costs), tile_(tile), bytes_(bytes), inputs_(inputs), device_(device) {
    for (int packs = 1; packs <= kMostHeldPacks; ++packs) {
      of_packs_[packs] =
          costs.rest * std::log(1 + costs.rest_packs / packs) + costs.alone * std::max(0.0, packs / 20.0 - 1);
    }
  }

  // Whether a cluster of so many blocks, and so all larger ones, would cost more.
  bool too_many(int blocks) const { return costs_.waiting * std::log(blocks) >= least_; }

  // A tile of so many packs of each line, or slabs of them, for `blocks` and some groups of threads in each.
  void offer(CudaPlan* plan, int packs, int blocks, int64_t groups, int slabs) {
    const int64_t lines = tile_.lines.elements();
    const int64_t held = ceil_div(ceil_div(lines, blocks), groups);
    if (held * inputs_ > kMostHeldPacks || slabs * groups * packs > kTileThreads) return;
    const int threads = static_cast<int>(ceil_div(slabs * groups * packs, 32) * 32);
    double cost = of_packs_[held * inputs_] + costs_.waiting * std::log(blocks);
    if (cost >= least_) return;
    cost += costs_.room * std::log(static_cast<double>(blocks) * threads * held / (lines * packs * slabs));
    cost += costs_.slabs * std::log(slabs);
    cost += packs * kPackBytes <= 64 ? costs_.narrow : packs * kPackBytes <= 128 ? costs_.rather_narrow : 0;
    if (tile_.spanning && tile_.segment * bytes_ % kSectorBytes != 0) cost += costs_.ragged / packs;
    // Without what is exchanged yet.
    if (cost + of_blocks(held * inputs_ * threads * kPackBytes, threads) >= least_) return;
    CudaPlan shape = *plan;
    if (!plan_tile(&shape, tile_, packs, static_cast<int>(groups), static_cast<int>(held), bytes_, inputs_,
                   static_cast<int>(slabs * groups * packs), device_, blocks, false)) {
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
                                             kThreadsTogether / threads);
    if (blocks < costs_.fewest_blocks) return HUGE_VAL;
    return costs_.pauses * std::max<int64_t>(0, costs_.enough_blocks - blocks) +
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

// A tile of slabs of `unit` packs.
bool plan_slab_tile(CudaPlan* plan, const Tile& slab, int unit, int bytes, int inputs, const Device& device) {
  CheapestTile cheapest(kSlabCosts, slab, bytes, inputs, device);
  for (int blocks = 1; blocks <= device.largest_cluster && !cheapest.too_many(blocks); ++blocks) {
    const int64_t lines = ceil_div(slab.lines.elements(), blocks);
    for (int held = 1; held * inputs <= kMostHeldPacks; ++held) {
      const int64_t groups = ceil_div(lines, held);
      int slabs = 0;
      for (const int threads : {64, 96, 128, 160, 192, kTileThreads}) {
        if (groups * unit > threads || slabs == (blocks > 1 ? 1 : threads / (groups * unit))) continue;
        slabs = blocks > 1 ? 1 : static_cast<int>(threads / (groups * unit));
        cheapest.offer(plan, unit, blocks, groups, slabs);
      }
    }
  }
  return cheapest.found(plan);
}

// A tile of lines of which each begins as the one `turn` lines on.
bool plan_line_tile(CudaPlan* plan, const Tile& tile, int turn, int bytes, int inputs, const Device& device) {
  CheapestTile cheapest(kLineCosts, tile, bytes, inputs, device);
  for (int blocks = 1; blocks <= device.largest_cluster && !cheapest.too_many(blocks); ++blocks) {
    for (int packs = tile.spanning ? 4 : 8; packs <= kTileThreads / turn; packs *= 2) {
      for (int groups = turn; groups * packs <= kTileThreads; groups *= 2) {
        if (groups * packs >= 64) cheapest.offer(plan, packs, blocks, groups, 1);
      }
    }
  }
  return cheapest.found(plan);
}

bool plan_tile(CudaPlan* plan, const View& view, int bytes, int inputs, const Device& device, bool passes) {
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
           plan_tile(plan, tile, static_cast<int>(shape.packs), static_cast<int>(shape.groups), static_cast<int>(held),
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

  Tile tile{};
  tile.inner = 1;
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
      const int unit = tile.spanning ? static_cast<int>(std::lcm<int64_t>(run.extent, width) / width) : 1;
      const int least = static_cast<int>(std::max<int64_t>(
          {unit, kTileLineBytes / kPackBytes, tile.spanning ? 1 : ceil_div(run.extent + width - 1, width)}));
      if (least <= most_threads && (tile.spanning || tile.lines.size == 1)) {
        if (tile.spanning ? try_shapes(tile, unit, least, same) : try_shapes(tile, 1, least, alike(tile.lines))) {
          return true;
        }
      }
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
    int best = 0;
    double best_use = 0;
    for (int cuts = 1; cuts <= 32; ++cuts) {  // by which most threads have most to do
      const int64_t packs = ceil_div(run_packs, cuts), groups = most_threads / packs;
      if (groups == 0) continue;
      const double use =
          static_cast<double>(run_packs) / (cuts * packs) * (packs * groups) / (ceil_div(packs * groups, 32) * 32);
      if (use > best_use * 1.02) best_use = use, best = static_cast<int>(packs);
    }
    if (best == 0) best = most_threads;
    tile.segment = static_cast<int64_t>(best) * width;
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
        plan_line_tile(plan, tile, 1, bytes, inputs, device)) {
      return true;
    }
    const bool wide = tile.segment >= 4 * packs * width;
    return try_shapes(tile, 1, !passes ? packs : wide ? 4 * packs : 2 * packs, same);
  }
  const int64_t rows_apart = width / std::gcd<int64_t>(kept.extent, width);  // that begin alike
  const int64_t unit = kept.extent * rows_apart / width;                     // packs
  if (run.stride == kept.extent && unit <= most_threads / 2 && whole_strides(tile.lines, tile.lines.size - 1)) {
    Tile slab = tile;
    slab.inner = kept.extent;
    slab.outer_mask = run.mask_stride;
    slab.inner_mask = kept.mask_stride;
    slab.run = run.extent * kept.extent;
    const bool aligned = slab.run % width == 0 && whole_strides(tile.kept, tile.kept.size);
    const int64_t run_packs = aligned ? slab.run / width : ceil_div(slab.run + width - 1, width);
    slab.segment = unit * width;
    slab.lines.dim[slab.lines.size - 1] = Dim{ceil_div(run_packs, unit), slab.segment, 0};
    if (slab.run <= kMostTileNumbers) {
      if (!passes && plan_slab_tile(plan, slab, static_cast<int>(unit), bytes, inputs, device)) return true;
      if (try_all(slab, fewer_held, [&](int64_t held) {
            return Shape{unit, std::min<int64_t>(most_threads / unit, ceil_div(slab.lines.elements(), held))};
          })) {
        return true;
      }
    }
  }
  if (tile.lines.size > 1) return false;
  if (!passes && run.extent <= kMostTileNumbers &&
      plan_line_tile(plan, tile, static_cast<int>(turn_of(width, run.stride)), bytes, inputs, device)) {
    return true;
  }
  return try_shapes(tile, 1, passes ? 16 : 8, alike(tile.lines));
}

}  // namespace

CudaPlan make_cuda_plan(const View& view, Op op, DType dtype, Alignment alignment, const Device& device, bool scratch) {
  const int bytes = kDTypeBytes[static_cast<int>(dtype)];
  const int per_pack = kPackBytes / bytes;
  CudaPlan plan{};
  plan.cluster = 1;
  plan.edges = Edges::kParts;
  const bool aligned_operands = alignment == Alignment::kAligned;
  const auto in_packs = [&] {
    plan.schedule = Schedule::kPacks;
    plan.threads = kPacksThreads;
    plan.lanes = 1;
    plan.packs = 2;
    plan.blocks = ceil_div(view.rows * view.columns, static_cast<int64_t>(plan.threads) * plan.packs * per_pack);
    return plan;
  };
  if (!view.minor_reduced && aligned_operands && view.reduced.size == 1 && view.columns <= kSlabColumns) {
    // Few neighbouring rows, interleaved.
    const int64_t inner = view.kept.dim[view.kept.size - 1].extent;
    const int64_t slab_bytes = view.columns * inner * bytes;
    const int64_t unit = std::lcm<int64_t>(inner, per_pack);  // rows of whole packs, and all of a slab's
    const int64_t row_bytes = view.columns * bytes * inputs_of(op);
    if (view.reduced.dim[0].stride == inner && slab_bytes <= kNarrowBytes && unit * row_bytes <= kNarrowUnitBytes &&
        (inner * bytes < kSegmentBytes || inner % per_pack != 0)) {
      plan.slab_inner = static_cast<int>(inner);
      if (!view.masked && 2 * per_pack % (view.columns * inner) == 0) return in_packs();
      plan.schedule = Schedule::kSlab;
      plan.threads = kSlabThreads;
      const LanesAndPacks shape = narrow_slab_shape(view.columns);
      plan.lanes = shape.lanes;
      plan.packs = shape.packs;
      plan.slab_pad = slab_bytes % kPackBytes == 0;
      const int64_t padded = plan.slab_pad ? kPackBytes * inputs_of(op) : 0;  // for inner rows
      int64_t units = std::max<int64_t>(1, kNarrowSlabBytes / (unit * row_bytes));
      if (units > 1) units -= units % 2;  // of whole sectors
      plan.slab_rows = static_cast<int>(unit * units);
      plan.slab_spread = 1;
      plan.blocks = ceil_div(view.rows, plan.slab_rows);
      plan.shared_bytes = static_cast<int>(plan.slab_rows * row_bytes + plan.slab_rows / inner * padded);
      return plan;
    }
  }
  if (!view.contiguous_rows() && aligned_operands) {
    const bool fits = plan_tile(&plan, view, bytes, inputs_of(op), device, false);
    const bool lonely = fits && device.largest_cluster > 1 && plan.shared_bytes > kLonelyTileBytes && !plan.tile.run;
    CudaPlan passes{};
    passes.cluster = 1;
    if (scratch && (!fits || lonely) && plan_tile(&passes, view, bytes, inputs_of(op), device, true)) return passes;
    if (fits) return plan;
  }
  plan = CudaPlan{};
  plan.cluster = 1;
  plan.edges = Edges::kParts;
  if (!view.minor_reduced) {
    const Dim& inner = view.kept.dim[view.kept.size - 1];
    plan.schedule = Schedule::kColumns;
    plan.threads = 256;
    plan.lanes = plan.threads / 32;
    plan.blocks = view.rows / inner.extent * ceil_div(inner.extent, 32 * kColumnsTogether);
    return plan;
  }
  if (!view.contiguous_rows() || alignment == Alignment::kMixed) {
    plan.schedule = Schedule::kGather;
    plan.threads = plan.lanes = 256;
    plan.blocks = view.rows;
    return plan;
  }

  const bool aligned = view.columns % per_pack == 0 && alignment == Alignment::kAligned;
  if (!aligned && alignment == Alignment::kAligned && !view.masked && per_pack % view.columns == 0) {
    return in_packs();
  }
  if (!aligned && alignment == Alignment::kAligned && view.columns <= kSlabColumns) {
    plan.schedule = Schedule::kSlab;
    plan.threads = kSlabThreads;
    const bool pairs = bytes == 2 && !view.masked && view.columns > kFewColumns;
    const LanesAndPacks shape = slab_shape(view.columns, bytes, pairs, inputs_of(op));
    plan.lanes = shape.lanes;
    plan.packs = shape.packs;
    const int64_t row_bytes = view.columns * bytes;
    // Whole turns of the block, and whole sectors: halves of one, written by two blocks, are written twice.
    const int whole = kSectorBytes / bytes;
    const auto unit = [&] { return std::max(whole, plan.threads / plan.lanes); };
    if (pairs) {
      const int slab_bytes = op == Op::kLogSoftmax ? 2 * kPairsSlabBytes : kPairsSlabBytes;
      const int turns = unit() < 2 * plan.threads / plan.lanes ? 2 : 1;
      plan.slab_rows =
          static_cast<int>(unit() * std::max<int64_t>(turns, slab_bytes / (unit() * row_bytes * inputs_of(op))));
    } else {
      while (unit() > whole && unit() * row_bytes > kSlabBytesAtMost) plan.threads /= 2;
      plan.slab_rows = static_cast<int>(unit() * std::max<int64_t>(1, kSlabBytes / (unit() * row_bytes)));
    }
    plan.slab_spread = pairs ? slab_spread(view.columns, plan.lanes, plan.slab_rows) : 1;
    plan.blocks = ceil_div(view.rows, plan.slab_rows);
    plan.shared_bytes = static_cast<int>(plan.slab_rows * row_bytes * inputs_of(op));
    return plan;
  }

  // An unaligned row is covered by aligned packs, whose number depends on where it starts; the most is what counts.
  const int64_t packs = aligned ? view.columns / per_pack : ceil_div(view.columns + per_pack - 1, per_pack);
  const auto set_edges = [&](int64_t threads) {
    if (aligned && !view.masked) plan.edges = packs == threads * plan.packs ? Edges::kNone : Edges::kWhole;
  };
  if (packs <= kWarpPacks) {
    plan.schedule = Schedule::kLanes;
    // Rows that need a look at their edges had better have several packs a thread, to share the cost of it.
    const LanesAndPacks* choice = plan.edges == Edges::kParts && !aligned ? kSharing : kSpread;
    while (choice->lanes * choice->packs < packs) ++choice;
    plan.lanes = choice->lanes;
    plan.packs = choice->packs;
    plan.threads = kLanesThreads;
    while (plan.threads > 32 && plan.threads * plan.packs * inputs_of(op) > kLanesBlockPacks) plan.threads /= 2;
    plan.blocks = ceil_div(view.rows, plan.threads / plan.lanes);
    set_edges(plan.lanes);
    return plan;
  }
  const bool plain = aligned && !view.masked, long_exponential = bytes == 8 && inputs_of(op) == 1;
  // 8 packs of 16 bits that may belong to the row or not take many registers: shared memory is better, where there is
  // much of it.
  const bool lengthens = plain && (bytes > 2 || packs % (8 * 32) == 0 || device.largest_cluster == 1);
  if (packs <= (!lengthens ? kBlockPacks : long_exponential ? kFloat64BlockPacks : kLongBlockPacks)) {
    plan.schedule = Schedule::kBlock;
    plan.packs = packs <= 4 * 256 ? 4 : 8;
    plan.threads = static_cast<int>(ceil_div(packs, plan.packs * 32) * 32);
    const int64_t block_bytes = packs * inputs_of(op) * kPackBytes;
    if (device.largest_cluster > 1 && bytes < 8) {
      // Log-softmax gains where blocks are no larger, the VJP of it nowhere: their arithmetic takes as long.
      const bool soon_done = op == Op::kSoftmax || op == Op::kSoftmaxLinear;
      const int64_t limited = soon_done ? kBlockBytesAtOnce / 2 : op == Op::kLogSoftmax ? kLargeBlockBytes : 0;
      if (block_bytes >= kLargeBlockBytes && block_bytes <= limited) {
        const int64_t at_once = ceil_div(kBlockBytesAtOnce, block_bytes);
        plan.shared_bytes = static_cast<int>(device.shared_memory_per_block / (at_once + 1));
      } else if (block_bytes >= kSmallBlockBytes && block_bytes < kLargeBlockBytes &&
                 packs == plan.threads * plan.packs) {
        plan.threads += 32;
      }
    }
    plan.lanes = plan.threads;
    plan.blocks = view.rows;
    set_edges(plan.threads);
    return plan;
  }

  const int inputs = inputs_of(op);
  set_edges(0);
  const bool clusters = device.largest_cluster > 1;
  const int64_t shared = device.shared_memory_per_block - kChunksStaticBytes;
  // A team has room for a pack more where it looks at edges, which is worth it if that makes fewer chunks: unless
  // blocks of a cluster had all that they have room for, arithmetic takes as long as memory does, or a ring would have
  // too few stages.
  const int room = chunk_room(inputs, plan.edges), more_room = chunk_room(inputs, Edges::kParts);
  const int64_t chunks_before = ceil_div(packs, room), chunks_with_more = ceil_div(packs, more_room);
  const bool full = clusters && chunks_before <= kMostBlocks && packs % room == 0;
  const bool in_ring = clusters && chunks_with_more > device.largest_cluster;
  const bool fits = !in_ring || shared / (more_room * inputs * kPackBytes) >= kFewestStages;
  if (chunks_with_more < chunks_before && !full &&
      chunks_with_more <= (inputs == 1 && bytes < 8 && fits ? kLongRing : kMostTeams)) {
    plan.edges = Edges::kParts;
  }
  cut_into_chunks(&plan, packs, inputs, plan.edges);
  plan.packs = chunk_packs(inputs, plan.edges);
  const int team_threads = chunk_threads(inputs, plan.edges);
  const int64_t chunk_bytes = plan.share * kPackBytes * inputs;
  const int64_t chunks = plan.chunks, all_chunks = view.rows * chunks;
  // As many teams as chunks to a block, and blocks to a cluster; true if that holds a row.
  const auto spread = [&](int64_t teams, int64_t most_blocks) {
    teams = std::min({teams, shared / chunk_bytes, chunks});
    const int64_t blocks = ceil_div(chunks, teams);
    if (blocks > most_blocks) return false;
    teams = ceil_div(chunks, blocks);
    plan.schedule = Schedule::kChunks;
    plan.cluster = static_cast<int>(blocks);
    plan.threads = static_cast<int>(teams * team_threads);
    plan.lanes = static_cast<int>(plan.threads * blocks);
    plan.blocks = view.rows * blocks;
    plan.shared_bytes = static_cast<int>(teams * chunk_bytes);
    return true;
  };
  const bool few = all_chunks <= static_cast<int64_t>(kFewChunks) * device.multiprocessors;
  const bool long_ring = chunks > kLongRing;
  int64_t stages = std::min<int64_t>(kMostStages, shared / chunk_bytes);
  if (long_ring) stages -= stages % 2;
  // Rings that held no more than a row and a third would wait for one another.
  const int64_t again = std::max<int64_t>(chunks - stages * device.multiprocessors * 3 / 4, 0);
  const int of_chunks = op == Op::kLogSoftmaxVjp ? kAgainOfChunksIfSummedAlone : kAgainOfChunks;
  const bool ring =
      scratch && clusters && stages >= kFewestStages && chunks <= kMostChunks && again * of_chunks <= chunks;
  // However many rows there are, they are cut into the same chunks, or all of them are read twice.
  const bool chunked = ring || !scratch || inputs == 2 || chunks <= device.largest_cluster ||
                       chunks <= std::min<int64_t>(kMostTeams, shared / chunk_bytes);
  if (clusters && chunked && all_chunks <= device.multiprocessors && spread(1, kSmallCluster)) return plan;
  if (spread(kMostTeams, 1)) return plan;
  if (clusters && inputs == 1 && !(few && ring) && spread(1, device.largest_cluster)) return plan;
  if (clusters && inputs == 2 && spread(kMostTeams, few && ring ? kSmallCluster : device.largest_cluster)) return plan;
  if (ring) {
    plan.scratch = true;
    plan.again = static_cast<int>(again);
    if (few && !plan.again) {
      plan.schedule = Schedule::kChunks;
      plan.threads = team_threads;
      plan.lanes = static_cast<int>(plan.threads * chunks);
      plan.blocks = all_chunks;
      plan.shared_bytes = static_cast<int>(chunk_bytes);
    } else {
      plan.schedule = Schedule::kRing;
      plan.threads = ring_threads(inputs, plan.edges) + (long_ring ? 32 : 0);
      plan.lanes = static_cast<int>(team_threads * chunks);
      plan.blocks = device.multiprocessors;
      plan.stages = static_cast<int>(stages);
      plan.shared_bytes = static_cast<int>(stages * chunk_bytes);
    }
    return plan;
  }
  if (!scratch && clusters && spread(kMostTeams, device.largest_cluster)) return plan;
  plan.edges = Edges::kParts;
  plan.packs = 0;
  plan.threads = kPassThreads;
  if (scratch) {
    plan.schedule = Schedule::kPasses;
    plan.scratch = true;
    cut(&plan, packs, piece_packs(packs, inputs));
    plan.blocks = view.rows * plan.chunks;
    plan.lanes = plan.threads * plan.chunks;
    return plan;
  }
  plan.schedule = Schedule::kStream;
  plan.chunks = 1;
  plan.lanes = plan.threads;
  plan.blocks = view.rows;
  return plan;
}

int64_t scratch_bytes(const View& view, Op op, DType dtype) {
  const int bytes = kDTypeBytes[static_cast<int>(dtype)], per_pack = kPackBytes / bytes;
  const int64_t state = 2 * std::max(bytes, 4);
  if (view.rows * view.columns == 0) return 0;
  if (!view.contiguous_rows()) {
    CudaPlan plan{};
    if (plan_tile(&plan, view, bytes, inputs_of(op), kSmallestDevice, false)) return 0;
    if (!plan_tile(&plan, view, bytes, inputs_of(op), kSmallestDevice, true)) return 0;
    return plan.tile.tiles * plan.tile.cluster * plan.tile.columns * state;
  }
  // Of unaligned operands, should it come to that: a row may begin anywhere in a pack.
  const int64_t packs = ceil_div(view.columns + per_pack - 1, per_pack);
  if (packs <= kBlockPacks) return 0;
  const int64_t chunks = most_chunks(packs, inputs_of(op), Edges::kNone);  // there are never more pieces than that
  if (chunks <= kFewestChunks) return 0;
  return view.rows * std::min<int64_t>(chunks, kMostChunks) * state + 8;
}

}  // namespace jax_softmax
