#include "plan.h"

#include <algorithm>
#include <iterator>

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

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads of a block whose lanes share rows among fewer than a warp.
constexpr int kLanesThreads = 128;
struct LanesAndPacks {
  int lanes, packs;
};
constexpr LanesAndPacks kSpread[] = {{1, 1},  {2, 1},  {4, 1},  {8, 1},  {4, 3},  {16, 1}, {8, 3}, {32, 1},
                                     {16, 3}, {32, 2}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
constexpr LanesAndPacks kSharing[] = {{1, 1},  {2, 1},  {4, 1},  {4, 2},  {8, 2},  {8, 3},  {16, 2},
                                      {16, 3}, {32, 2}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
// The most packs that a warp, and a block, hold in registers without a spill.
constexpr int kWarpPacks = 8 * 32;
constexpr int kBlockPacks = 4 * 256;
constexpr int kLongBlockPacks = 8 * 256;  // where there are no edges and no mask
// Static shared memory of the chunks and ring schedules, rounded up.
constexpr int kChunksStaticBytes = 3 << 10;
// Up to so many chunks for each multiprocessor are spread one to a block: a call that ends sooner than a ring fills.
// All of these blocks run at once, so that they may wait for one another.
constexpr int kFewChunks = 8;
// Fewer chunks than that, of a row that a small cluster can hold, leave room for one to a multiprocessor.
constexpr int kSmallCluster = 8;
// Rows of more chunks are waited for by two warps.
constexpr int kLongRing = 64;
// The passes schedule: bytes of a row's piece and of what is read between the two passes over it, and the most pieces.
constexpr int64_t kPieceBytes = 64 << 10;
constexpr int64_t kPassBytes = 24 << 20;
constexpr int kMostPieces = 512;
// The most chunks of a row that are exchanged.
constexpr int kMostChunks = 2048;
// A block of any chip has room for so many chunks.
constexpr int kFewestChunks = 3;
// The slab schedule: the longest row, and about how large a slab is to be.
constexpr int kSlabColumns = 512;
constexpr int kSlabBytes = 16 << 10;
constexpr int kSlabBytesAtMost = 40 << 10;  // what every chip has without asking

// How many turns shared memory takes to serve a warp of whose lanes so many share a row, each reading an element.
int bank_turns(int64_t columns, int bytes, int lanes) {
  constexpr int kBanks = 32, kBankBytes = 4;
  int64_t word[kBanks][32];
  int words[kBanks] = {}, turns = 0;
  for (int thread = 0; thread < 32; ++thread) {
    const int64_t at = (thread / lanes * columns + thread % lanes) * bytes / kBankBytes;
    const int bank = static_cast<int>(at % kBanks);
    if (std::find(word[bank], word[bank] + words[bank], at) == word[bank] + words[bank]) word[bank][words[bank]++] = at;
    turns = std::max(turns, words[bank]);
  }
  return turns;
}

// Lanes that share a row of a slab, and elements that each has room for: few lanes, unless their rows lie so that they
// keep one another waiting.
LanesAndPacks slab_shape(int64_t columns, int bytes) {
  constexpr int kOne[] = {3, 7, 15, 23, 31}, kMore[] = {9, 12, 16};
  const auto least = [](const auto& held, int64_t n) { return *std::lower_bound(std::begin(held), std::end(held), n); };
  if (columns <= 31) return {1, least(kOne, columns)};
  if (columns <= 34) return {2, 17};
  const int least_lanes = columns <= 64 ? 4 : columns <= 128 ? 8 : columns <= 256 ? 16 : 32;
  const int lanes = least_lanes < 16 && bank_turns(columns, bytes, least_lanes) > 1 ? 16 : least_lanes;
  const int64_t held = ceil_div(columns, lanes);
  return {lanes, lanes == 16 && held <= 5 ? 5 : least(kMore, held)};
}

// Cuts a row into equal parts of at most so many packs.
void cut(CudaPlan* plan, int64_t packs, int64_t most) {
  plan->chunks = static_cast<int>(ceil_div(packs, most));
  plan->share = ceil_div(packs, plan->chunks);
}

void cut_into_chunks(CudaPlan* plan, int64_t packs, int inputs, Edges edges) {
  cut(plan, packs, chunk_threads(inputs, edges) * chunk_packs(inputs, edges));
  // For a cluster, a multiple of what a block has, so that no block has fewer.
  if (inputs == 1 || plan->chunks <= kMostTeams) return;
  plan->chunks = static_cast<int>(ceil_div(plan->chunks, kMostTeams) * kMostTeams);
  plan->share = ceil_div(packs, plan->chunks);
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
  if (!view.minor_reduced) {
    const Dim& inner = view.kept.dim[view.kept.size - 1];
    plan.schedule = Schedule::kColumns;
    plan.threads = 256;
    plan.lanes = plan.threads / 32;
    plan.blocks = view.rows / inner.extent * ceil_div(inner.extent, 32);
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
    plan.schedule = Schedule::kPacks;
    plan.threads = kPacksThreads;
    plan.lanes = 1;
    plan.packs = 2;
    plan.blocks = ceil_div(view.rows * view.columns, static_cast<int64_t>(plan.threads) * plan.packs * per_pack);
    return plan;
  }
  if (!aligned && alignment == Alignment::kAligned && view.columns <= kSlabColumns) {
    plan.schedule = Schedule::kSlab;
    plan.threads = kSlabThreads;
    const LanesAndPacks shape = slab_shape(view.columns, bytes);
    plan.lanes = shape.lanes;
    plan.packs = shape.packs;
    const int64_t row_bytes = view.columns * bytes * inputs_of(op);
    // Whole turns of the block, and a slab's bytes a multiple of 16.
    const auto unit = [&] { return std::max(per_pack, plan.threads / plan.lanes); };
    while (unit() * row_bytes > kSlabBytesAtMost) plan.threads /= 2;
    plan.slab_rows = static_cast<int>(unit() * std::max<int64_t>(1, kSlabBytes / (unit() * row_bytes)));
    plan.blocks = ceil_div(view.rows, plan.slab_rows);
    plan.shared_bytes = static_cast<int>(plan.slab_rows * row_bytes);
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
    plan.blocks = ceil_div(view.rows, plan.threads / plan.lanes);
    set_edges(plan.lanes);
    return plan;
  }
  const bool plain = aligned && !view.masked;
  if (packs <= (plain ? kLongBlockPacks : kBlockPacks)) {
    plan.schedule = Schedule::kBlock;
    plan.packs = packs <= 4 * 256 ? 4 : 8;
    plan.threads = plan.lanes = static_cast<int>(ceil_div(packs, plan.packs * 32) * 32);
    plan.blocks = view.rows;
    set_edges(plan.threads);
    return plan;
  }

  const int inputs = inputs_of(op);
  set_edges(0);
  cut_into_chunks(&plan, packs, inputs, plan.edges);
  plan.packs = chunk_packs(inputs, plan.edges);
  const int team_threads = chunk_threads(inputs, plan.edges);
  const int64_t chunk_bytes = plan.share * kPackBytes * inputs;
  const int64_t shared = device.shared_memory_per_block - kChunksStaticBytes;
  const int64_t chunks = plan.chunks, all_chunks = view.rows * chunks;
  const bool clusters = device.largest_cluster > 1;
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
  if (clusters && all_chunks <= device.multiprocessors && spread(1, kSmallCluster)) return plan;
  if (spread(kMostTeams, 1)) return plan;
  if (clusters && inputs == 2 && spread(kMostTeams, kSmallCluster)) return plan;
  const int64_t stages = std::min<int64_t>(kMostStages, shared / chunk_bytes);
  // Rings that hold no more than a row and a third would wait for one another.
  if (scratch && clusters && chunks * 4 <= stages * device.multiprocessors * 3 && chunks <= kMostChunks) {
    plan.scratch = true;
    if (few) {
      plan.schedule = Schedule::kChunks;
      plan.threads = team_threads;
      plan.lanes = static_cast<int>(plan.threads * chunks);
      plan.blocks = all_chunks;
      plan.shared_bytes = static_cast<int>(chunk_bytes);
    } else {
      plan.schedule = Schedule::kRing;
      plan.threads = ring_threads(inputs, plan.edges) + (chunks > kLongRing ? 32 : 0);
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
    plan.blocks = 2 * plan.chunks;
    plan.lanes = plan.threads * plan.chunks;
    plan.launch_rows = std::max<int64_t>(1, kPassBytes / (packs * kPackBytes * inputs));
    return plan;
  }
  plan.schedule = Schedule::kStream;
  plan.chunks = 1;
  plan.lanes = plan.threads;
  plan.blocks = view.rows;
  return plan;
}

int64_t scratch_bytes(const View& view, Op op, DType dtype) {
  const int per_pack = kPackBytes / kDTypeBytes[static_cast<int>(dtype)];
  if (!view.contiguous_rows()) return 0;
  // Of unaligned operands, should it come to that: a row may begin anywhere in a pack.
  const int64_t packs = ceil_div(view.columns + per_pack - 1, per_pack);
  if (packs <= kBlockPacks) return 0;
  CudaPlan plan{};  // there are never more pieces than chunks
  cut_into_chunks(&plan, packs, inputs_of(op), Edges::kNone);
  if (plan.chunks <= kFewestChunks) return 0;
  const int64_t state = dtype == DType::kF64 ? 16 : 8;
  return view.rows * std::min(plan.chunks, kMostChunks) * state + 8;
}

}  // namespace jax_softmax
