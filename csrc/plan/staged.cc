#include <algorithm>
#include <iterator>

#include "plan/plan.h"

namespace jax_softmax {

namespace {

constexpr int kColumns = 512;               // of the longest row
constexpr int kThreads = 128;               // of a block
constexpr int kSlabBytes = 17 << 9;         // of a block's rows of one operand: 8 KB, or a little more
constexpr int kSlabBytesAtMost = 12 << 10;  // where fewer threads help
// Of a block's rows of all operands, where lanes have pairs of elements; twice that if results take logarithms.
constexpr int kPairsSlabBytes = 25 << 9;
// Of a block's shared memory. Results of fewer bytes than the operands' would take more, for whole sectors of them.
constexpr int64_t kMostSharedBytes = 48 << 10;
constexpr int kFewColumns = 34;  // of a row of one lane or two

// In how many turns shared memory serves a warp in which each lane reads a pair of 16-bit elements: `lanes` lanes share
// a row, and the warp's rows are `apart` apart.
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

// The Staged::spread of the fewest turns.
int spread_of(int64_t columns, int lanes, int rows) {
  const int teams = 32 / lanes;
  int best = 1, least = bank_turns(columns, lanes, 1);
  for (int apart = 2; least > 1 && rows % (teams * apart) == 0; apart *= 2) {
    const int turns = bank_turns(columns, lanes, apart);
    if (turns < least) least = turns, best = apart;
  }
  return best;
}

}  // namespace

std::optional<Staged> plan_staged(const Problem& problem) {
  const View& view = problem.view;
  const int bytes = problem.footprint.in_bytes, inputs = problem.cost.inputs;
  if (!view.contiguous_rows() || view.columns > kColumns) return {};
  const int columns = static_cast<int>(view.columns);
  if (columns % problem.footprint.width() == 0 && problem.footprint.packs)
    return {};  // rows of whole packs need no staging

  Staged plan{};
  plan.threads = kThreads;
  plan.pairs = bytes == 2 && problem.footprint.out_bytes == 2 && !problem.masked && problem.identity_load &&
               !problem.fused && columns > kFewColumns && problem.cost.row_results == 0;
  // As many lanes as leave each few elements in registers.
  const int in_pairs = columns / 2 * 2;  // an odd last element has a register of its own
  if (plan.pairs) {
    const int most = in_pairs <= 64 || inputs == 2 ? 16 : 32;
    for (plan.lanes = 4; plan.lanes * most < in_pairs;) plan.lanes *= 2;
    plan.lane_elements = static_cast<int>(2 * ceil_div(in_pairs / 2, plan.lanes));
  } else {
    plan.lanes = columns <= 31            ? 1
                 : columns <= kFewColumns ? 2
                 : columns <= 64          ? 4
                 : columns <= 128         ? 8
                 : columns <= 256         ? 16
                                          : 32;
    plan.lane_elements = static_cast<int>(ceil_div(columns, plan.lanes));
  }
  const int64_t row_bytes = static_cast<int64_t>(columns) * std::max(bytes, problem.footprint.out_bytes);
  // Whole turns of the block's lanes, at least two if several lanes have a row; and whole sectors, since a sector that
  // two blocks write halves of is written twice.
  const int whole = std::max(kPackBytes / bytes, kSectorBytes / problem.footprint.out_bytes),
            turns = plan.lanes > 2 ? 2 : 1;
  const auto unit = [&] { return std::max(whole, plan.threads / plan.lanes); };
  const auto units = [&] { return unit() < turns * plan.threads / plan.lanes ? 2 : 1; };
  int64_t slab_bytes = kSlabBytes;
  if (plan.pairs) {
    slab_bytes = (problem.cost.logarithms ? 2 : 1) * kPairsSlabBytes / inputs;
  } else {
    while (units() * unit() > whole && plan.threads > 32 * turns && units() * unit() * row_bytes > kSlabBytesAtMost) {
      plan.threads /= 2;
    }
  }
  plan.rows = static_cast<int>(unit() * std::max<int64_t>(units(), slab_bytes / (unit() * row_bytes)));
  if (geometry_of(view, plan, problem.footprint).shared_bytes > kMostSharedBytes) return {};
  plan.spread = plan.pairs ? spread_of(columns, plan.lanes, plan.rows) : 1;
  return plan;
}

}  // namespace jax_softmax
