#include "plan.h"

#include <algorithm>

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

constexpr int64_t power_of_two_at_least(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Threads of a block whose lanes share rows among fewer than a warp.
constexpr int kLanesThreads = 128;
struct LanesAndPacks {
  int lanes, packs;
};
constexpr LanesAndPacks kSpread[] = {{1, 1},  {2, 1},  {4, 1},  {8, 1},  {16, 1}, {32, 1},
                                     {32, 2}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
constexpr LanesAndPacks kSharing[] = {{1, 1},  {2, 1},  {4, 1},  {4, 2},  {8, 2},  {8, 3},  {16, 2},
                                      {16, 3}, {32, 2}, {32, 3}, {32, 4}, {32, 5}, {32, 6}, {32, 8}};
// The most packs that a warp, and a block, hold in registers without a spill.
constexpr int kWarpPacks = 8 * 32;
constexpr int kBlockPacks = 4 * 256;
constexpr int kWholeBlockPacks = 8 * 256;  // where all threads' packs are full
// Packs of all operands that each block of a cluster should hold: few enough for three blocks on a multiprocessor.
constexpr int kClusterPacks = 16 * 256;
// Static shared memory of the cluster schedule, rounded up.
constexpr int kClusterStaticBytes = 3 << 10;
// The slab schedule: the longest row, and about how large a slab is to be.
constexpr int kSlabColumns = 32;
constexpr int kSlabBytes = 12 << 10;
constexpr int kSlabBytesAtMost = 40 << 10;  // what every chip has without asking
constexpr int kSlabThreads = 256;

}  // namespace

CudaPlan make_cuda_plan(const View& view, Op op, DType dtype, Alignment alignment, const Device& device) {
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
  if (!aligned && alignment == Alignment::kAligned && view.columns <= kSlabColumns) {
    plan.schedule = Schedule::kSlab;
    plan.threads = kSlabThreads;
    while (plan.threads * view.columns * bytes * inputs_of(op) > kSlabBytesAtMost) plan.threads /= 2;
    plan.lanes = 1;
    plan.packs = view.columns <= 4 ? 4 : static_cast<int>(ceil_div(view.columns, 8) * 8);
    const int64_t row_bytes = view.columns * bytes * inputs_of(op);
    plan.slab_rows = static_cast<int>(plan.threads * std::max<int64_t>(1, kSlabBytes / (plan.threads * row_bytes)));
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
  if (packs <= kBlockPacks || (aligned && !view.masked && packs <= kWholeBlockPacks && packs % 256 == 0)) {
    plan.schedule = Schedule::kBlock;
    plan.packs = packs <= kBlockPacks ? 4 : 8;
    plan.threads = plan.lanes = static_cast<int>(ceil_div(packs, plan.packs * 32) * 32);
    plan.blocks = view.rows;
    set_edges(plan.threads);
    return plan;
  }
  plan.cluster = static_cast<int>(
      std::min<int64_t>(power_of_two_at_least(ceil_div(packs * inputs_of(op), kClusterPacks)), device.largest_cluster));
  const int64_t shared = ceil_div(packs, plan.cluster) * kPackBytes * inputs_of(op);
  if (shared <= device.shared_memory_per_block - kClusterStaticBytes) {
    plan.schedule = Schedule::kCluster;
    plan.threads = 256;
    const int64_t share = ceil_div(packs, plan.cluster);
    plan.packs = share <= 8 * plan.threads ? 8 : share <= 16 * plan.threads ? 16 : 0;
    set_edges(plan.threads * plan.cluster);
    plan.lanes = plan.threads * plan.cluster;
    plan.blocks = view.rows * plan.cluster;
    plan.shared_bytes = static_cast<int>(shared);
    return plan;
  }
  plan.cluster = 1;
  plan.schedule = Schedule::kStream;
  plan.threads = plan.lanes = 512;
  plan.blocks = view.rows;
  return plan;
}

}  // namespace jax_softmax
