#include "plan.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "plan_tile.h"

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
// Nor is it faster then if more chunks have edges to look at.
constexpr int kMostPartsSummedAlone = 1100;
// Teams of few threads take too long for the rings if a row has more chunks with edges than this.
constexpr int kManyParts = 500;
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
// Tiles and strips are better than slabs in which lanes have room for so many times a row's columns, of as many columns
// as these and more, but no more than those, and up to 32 bits.
constexpr double kMostNarrowRoom = 1.75;
constexpr int kRoomyColumns = 5, kMostRoomyColumns = 256;

// How many turns shared memory takes to serve a warp that reads a pair of 16-bit elements in each of the lanes that
// share a row, of rows so many apart.
int bank_turns(int64_t columns, int lanes, int apart) {
  constexpr int kBanks = 32;
  int64_t word[kBanks][32];
  int words[kBanks] = {}, turns = 0;
  for (int thread = 0; thread < 32; ++thread) {
    const int64_t at = ceil_div(thread / lanes * apart * columns, 2) + thread % lanes;
    const int bank = static_cast<int>(at % kBanks);
    if (std::find(word[bank], word[bank] + words[bank], at) == word[bank] + words[bank]) word[bank][words[bank]++] = at;
    turns = std::max(turns, words[bank]);
  }
  return turns;
}

// A power of 2: how many rows apart those are to be of whose pairs a warp reads, for the fewest turns.
int slab_spread(int64_t columns, int lanes, int rows) {
  const int teams = 32 / lanes;
  int best = 1, least = bank_turns(columns, lanes, 1);
  for (int apart = 2; least > 1 && rows % (teams * apart) == 0; apart *= 2) {
    const int turns = bank_turns(columns, lanes, apart);
    if (turns < least) least = turns, best = apart;
  }
  return best;
}

// Lanes that share a row of a slab, and elements that each has room for. The arithmetic of float64 takes so long that
// room which is not used had better be little.
LanesAndPacks slab_shape(int64_t columns, int bytes, bool pairs, int inputs) {
  constexpr int kOne[] = {3, 7, 15, 23, 31}, kMore[] = {9, 12, 16}, kPairs[] = {10, 12, 16, 20, 24, 32};
  constexpr int kOneOf64[] = {3, 7, 11, 15}, kTwoOf64[] = {9, 11, 13, 15, 17}, kMoreOf64[] = {9, 10, 12, 14, 16};
  const auto least = [](const auto& held, int64_t n) { return *std::lower_bound(std::begin(held), std::end(held), n); };
  if (columns <= (bytes == 8 ? 15 : 31)) return {1, bytes == 8 ? least(kOneOf64, columns) : least(kOne, columns)};
  if (columns <= kFewColumns) return {2, bytes == 8 ? least(kTwoOf64, ceil_div(columns, 2)) : 17};
  if (pairs) {
    const int64_t in_pairs = columns / 2 * 2;  // an element that is left has room of its own
    const int most = in_pairs <= 64 || inputs == 2 ? 16 : 32;
    int lanes = 4;
    while (lanes * most < in_pairs) lanes *= 2;
    return {lanes, least(kPairs, 2 * ceil_div(in_pairs / 2, lanes))};
  }
  const int lanes = columns <= 64 ? 4 : columns <= 128 ? 8 : columns <= 256 ? 16 : 32;
  const int64_t held = ceil_div(columns, lanes);
  return {lanes, bytes == 8 ? least(kMoreOf64, held) : least(kMore, held)};
}

LanesAndPacks narrow_slab_shape(int64_t columns) {
  if (columns <= 4) return {1, 4};
  if (columns <= 16) return {1, 16};
  return {columns <= 64 ? 4 : columns <= 256 ? 16 : 32, 16};
}

// Whether lanes would have so much more room than a row has columns that strips and tiles are faster.
bool is_roomy(LanesAndPacks shape, int64_t columns, int bytes) {
  return bytes < 8 && columns >= kRoomyColumns && columns <= kMostRoomyColumns &&
         shape.lanes * shape.packs >= kMostNarrowRoom * static_cast<double>(columns);
}

// Cuts a row into equal parts of at most so many packs.
void cut(CudaPlan* plan, int64_t packs, int64_t most) {
  plan->chunks = static_cast<int>(ceil_div(packs, most));
  plan->share = ceil_div(packs, plan->chunks);
}

// Packs of each operand that a chunk has room for.
constexpr int chunk_room(int inputs, Edges edges) { return chunk_threads(inputs, edges) * chunk_packs(inputs, edges); }

// The most chunks of a row of so many packs, of each operand in the row and in the room for a chunk.
int64_t most_chunks(int64_t packs, int inputs, int room) {
  const int64_t chunks = ceil_div(packs, room);
  // For a cluster, a multiple of what a block has, so that few blocks have fewer.
  return inputs == 2 && chunks > kMostTeams ? ceil_div(chunks, kMostTeams) * kMostTeams : chunks;
}

// Into whole lines of the last cache, where rows are, and no more than there is room for.
void cut_into_chunks(CudaPlan* plan, int64_t packs, int inputs, int room) {
  plan->share = ceil_div(ceil_div(packs, most_chunks(packs, inputs, room)), kLinePacks) * kLinePacks;
  plan->chunks = static_cast<int>(ceil_div(packs, plan->share));
}

int64_t piece_packs(int64_t packs, int inputs) {
  return std::max(ceil_div(packs, kMostPieces), kPieceBytes / kPackBytes / inputs);
}

}  // namespace

CudaPlan make_cuda_plan(const View& view, Op op, DType dtype, Alignment alignment, const Device& device, bool scratch) {
  const int bytes = kDTypeBytes[static_cast<int>(dtype)];
  const int per_pack = kPackBytes / bytes;
  CudaPlan plan{};
  plan.cluster = 1;
  plan.edges = Edges::kParts;
  if (view.rows * view.columns == 0) return plan;  // of no blocks
  const bool aligned_operands = alignment == Alignment::kAligned;
  const auto in_packs = [&] {
    plan.schedule = Schedule::kPacks;
    plan.lanes = 1;
    // As few packs as have whole rows, so that many threads read at once: two of rows that take logarithms.
    const bool together = view.columns * std::max(plan.slab_inner, 1) > per_pack;
    plan.packs = together || (op == Op::kLogSoftmax && view.columns > 1) ? 2 : 1;
    plan.threads = together ? kPacksThreads : kPacksThreads / 2;
    plan.blocks = ceil_div(view.rows * view.columns, static_cast<int64_t>(plan.threads) * plan.packs * per_pack);
    return plan;
  };
  if (!view.minor_reduced && aligned_operands && view.reduced.size == 1 && view.columns <= kSlabColumns) {
    // Few neighbouring rows, interleaved.
    const int64_t inner = view.kept.dim[view.kept.size - 1].extent;
    const int64_t slab_bytes = view.columns * inner * bytes;
    const int64_t unit = std::lcm<int64_t>(inner, per_pack);  // rows of whole packs, and all of a slab's
    const int64_t row_bytes = view.columns * bytes * inputs_of(op);
    const bool narrow = view.reduced.dim[0].stride == inner && slab_bytes <= kNarrowBytes &&
                        unit * row_bytes <= kNarrowUnitBytes &&
                        (inner * bytes < kSegmentBytes || inner % per_pack != 0);
    if (narrow && !view.masked && 2 * per_pack % (view.columns * inner) == 0) {
      plan.slab_inner = static_cast<int>(inner);
      return in_packs();
    }
    const LanesAndPacks shape = narrow_slab_shape(view.columns);
    if (narrow && !is_roomy(shape, view.columns, bytes)) {
      plan.schedule = Schedule::kSlab;
      plan.slab_inner = static_cast<int>(inner);
      plan.threads = kSlabThreads;
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
  if (!view.contiguous_rows() && aligned_operands && plan_tile(&plan, view, bytes, inputs_of(op), device, scratch)) {
    return plan;
  }
  plan = CudaPlan{};
  plan.cluster = 1;
  plan.edges = Edges::kParts;
  if (!view.minor_reduced) {
    plan.schedule = Schedule::kColumns;
    plan.threads = 256;
    plan.lanes = plan.threads / 32;
    plan.blocks = ceil_div(view.rows, 32 * kColumnsTogether);
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
    // Whole turns of the block, two at the least if several lanes have a row, and whole sectors: halves of one, written
    // by two blocks, are written twice.
    const int whole = kSectorBytes / bytes, turns = plan.lanes > 2 ? 2 : 1, least = 32 * turns;
    const auto unit = [&] { return std::max(whole, plan.threads / plan.lanes); };
    const auto units = [&] { return unit() < turns * plan.threads / plan.lanes ? 2 : 1; };
    int64_t slab_bytes = kSlabBytes;  // of one operand
    if (pairs) {
      slab_bytes = (op == Op::kLogSoftmax ? 2 * kPairsSlabBytes : kPairsSlabBytes) / inputs_of(op);
    } else {
      while (units() * unit() > whole && plan.threads > least && units() * unit() * row_bytes > kSlabBytesAtMost) {
        plan.threads /= 2;
      }
    }
    plan.slab_rows = static_cast<int>(unit() * std::max<int64_t>(units(), slab_bytes / (unit() * row_bytes)));
    plan.slab_spread = pairs ? slab_spread(view.columns, plan.lanes, plan.slab_rows) : 1;
    plan.blocks = ceil_div(view.rows, plan.slab_rows);
    plan.shared_bytes = static_cast<int>(plan.slab_rows * row_bytes * inputs_of(op));
    return plan;
  }

  // An unaligned row is covered by aligned packs, whose number depends on where it starts; the most is what counts.
  // They are counted from the start of a line of the last cache if they are many: warps and blocks that share none with
  // others are faster. A row of whole packs begins with its own, since its bits must not depend on where it lies.
  int64_t packs;
  const auto set_packs = [&](int boundary) {
    plan.boundary = view.columns % per_pack == 0 ? kPackBytes : boundary;
    packs = aligned ? view.columns / per_pack : ceil_div(view.columns + plan.boundary / bytes - 1, per_pack);
  };
  set_packs(kPackBytes);
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
  set_packs(kLineBytes);
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
  // Where rings have whole packs that begin within lines, stages leave room for whole lines.
  const bool within_lines = in_ring && plan.edges == Edges::kWhole && view.columns * bytes % kLineBytes != 0;
  if (chunks_with_more < chunks_before && !full && !within_lines &&
      chunks_with_more <= (inputs == 1 && bytes < 8 && fits ? kLongRing : kMostTeams)) {
    plan.edges = Edges::kParts;
  }
  if (clusters && inputs == 2 && plan.edges == Edges::kParts && chunks_with_more > kManyParts) {
    plan.edges = Edges::kPartsOfMany;
  }
  cut_into_chunks(&plan, packs, inputs, chunk_room(inputs, plan.edges));
  int spare = 0;
  if (within_lines && plan.chunks > device.largest_cluster * (inputs == 1 ? 1 : kMostTeams)) {
    spare = kLinePacks;
    cut_into_chunks(&plan, packs, inputs, chunk_room(inputs, plan.edges) - spare);
  }
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
  int64_t stages = std::min<int64_t>(kMostStages, shared / (chunk_bytes + spare * kPackBytes * inputs));
  if (long_ring) stages -= stages % 2;
  // Rings that held no more than a row and a third would wait for one another.
  const int64_t again = std::max<int64_t>(chunks - stages * device.multiprocessors * 3 / 4, 0);
  const int of_chunks = op == Op::kLogSoftmaxVjp ? kAgainOfChunksIfSummedAlone : kAgainOfChunks;
  const bool late = op == Op::kLogSoftmaxVjp && plan.edges == Edges::kPartsOfMany && chunks > kMostPartsSummedAlone;
  const bool ring =
      scratch && clusters && stages >= kFewestStages && chunks <= kMostChunks && again * of_chunks <= chunks && !late;
  // However many rows there are, they are cut into the same chunks, or all of them are read twice.
  const bool chunked = ring || !scratch || inputs == 2 || chunks <= device.largest_cluster ||
                       chunks <= std::min<int64_t>(kMostTeams, shared / chunk_bytes);
  const int few_blocks = std::min(kSmallCluster, device.largest_cluster);
  if (clusters && chunked && all_chunks <= device.multiprocessors && spread(1, few_blocks)) return plan;
  if (spread(kMostTeams, 1)) return plan;
  if (clusters && inputs == 1 && !(few && ring) && spread(1, device.largest_cluster)) return plan;
  if (clusters && inputs == 2 && spread(kMostTeams, few && ring ? few_blocks : device.largest_cluster)) return plan;
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
      plan.spare = spare;
      plan.shared_bytes = static_cast<int>(stages * (plan.share + spare) * kPackBytes * inputs);
    }
    return plan;
  }
  if (!scratch && clusters && spread(kMostTeams, device.largest_cluster)) return plan;
  plan.edges = Edges::kParts;
  plan.packs = 0;
  plan.threads = kPassThreads;
  set_packs(kPackBytes);
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
  if (!view.contiguous_rows()) return tile_scratch_bytes(view, bytes, inputs_of(op));
  // Of unaligned operands, should it come to that: a row may begin anywhere in a line of the last cache.
  const int64_t packs = ceil_div(view.columns + kLineBytes / bytes - 1, per_pack);
  if (packs <= kBlockPacks) return 0;
  const int inputs = inputs_of(op);
  // There are never more pieces than that.
  const int64_t chunks = most_chunks(packs, inputs, chunk_room(inputs, Edges::kNone) - kLinePacks);
  if (chunks <= kFewestChunks) return 0;
  return view.rows * std::min<int64_t>(chunks, kMostChunks) * state + 8;
}

}  // namespace jax_softmax
