#include <algorithm>

#include "plan/plan.h"

namespace jax_softmax {

namespace {

constexpr int kColumns = 512;               // of the longest row
constexpr int kThreads = 128;               // of a block
constexpr int kSlabBytes = 17 << 9;         // of a block's rows of one operand: 8 KB, or a little more
constexpr int kSlabBytesAtMost = 12 << 10;  // where fewer threads help
// Of a block's shared memory. Results of fewer bytes than the operands' would take more, for whole sectors of them.
constexpr int64_t kMostSharedBytes = 48 << 10;

}  // namespace

std::optional<Staged> plan_staged(const Problem& problem) {
  const View& view = problem.view;
  const int bytes = problem.footprint.in_bytes;
  if (!view.contiguous_rows() || view.columns > kColumns) return {};
  const int columns = static_cast<int>(view.columns);
  if (columns % problem.footprint.width() == 0 && problem.footprint.packs)
    return {};  // rows of whole packs need no staging

  Staged plan{};
  plan.threads = kThreads;
  // As many lanes as leave each few elements in registers.
  plan.lanes = columns <= 31    ? 1
               : columns <= 34  ? 2
               : columns <= 64  ? 4
               : columns <= 128 ? 8
               : columns <= 256 ? 16
                                : 32;
  plan.lane_elements = static_cast<int>(ceil_div(columns, plan.lanes));
  const int64_t row_bytes = static_cast<int64_t>(columns) * std::max(bytes, problem.footprint.out_bytes);
  // Whole turns of the block's lanes, at least two if several lanes have a row; and whole sectors, since a sector that
  // two blocks write halves of is written twice.
  const int whole = std::max(kPackBytes / bytes, kSectorBytes / problem.footprint.out_bytes),
            turns = plan.lanes > 2 ? 2 : 1;
  const auto unit = [&] { return std::max(whole, plan.threads / plan.lanes); };
  const auto units = [&] { return unit() < turns * plan.threads / plan.lanes ? 2 : 1; };
  while (units() * unit() > whole && plan.threads > 32 * turns && units() * unit() * row_bytes > kSlabBytesAtMost) {
    plan.threads /= 2;
  }
  plan.rows = static_cast<int>(unit() * std::max<int64_t>(units(), kSlabBytes / (unit() * row_bytes)));
  if (geometry_of(view, plan, problem.footprint).shared_bytes > kMostSharedBytes) return {};
  return plan;
}

}  // namespace jax_softmax
