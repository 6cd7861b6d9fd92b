// The schedule `registers`: a row in the registers of a team of lanes. A lane first reads all of its packs, and keeps
// them as they are in memory, or their terms if results are scaled terms.
#pragma once

#include "device/reduce.cuh"
#include "device/row.cuh"
#include "geometry/registers.h"

namespace jax_softmax::device {

// One lane's packs of a row: pack p of the lane is pack rank + p * kLanes of the row.
template <class Mem, class Plan>
struct RowOfLane {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using Row = RowPacks<Mem, Plan>;
  static constexpr int kPacks = Plan::kPlan.packs, kLanes = Plan::kPlan.lanes;
  static constexpr int kWidth = Mem::kWidth, kInputs = Mem::kInputs;
  static constexpr bool kKeepsTerms = Op::kResultIsScaledTerm;
  using RowTeam = Team<Op, kLanes, Plan::kPlan.threads>;
  using Packs = Pack[kPacks][kInputs];
  using Masks = unsigned[Mem::kMasked ? kPacks : 1];  // of each pack the unmasked elements, as bits
  using Cached = typename Mem::Cached[kPacks];
  using Terms = C[kKeepsTerms ? kPacks : 1][kWidth];

  const Mem& mem;
  const Row& row;
  const int rank = RowTeam::rank();

  // Whether the row has the lane's pack p. Where the compiler knows that all lanes have it, there is no check.
  __device__ __forceinline__ bool exists(int p) const {
    return (p + 1) * kLanes <= Row::kPacks || rank + p * kLanes < Row::kPacks;
  }
  __device__ __forceinline__ typename Row::PackLocation locate(int p) const { return row.locate(rank + p * kLanes); }
  // As bits, the elements of a pack that count.
  __device__ __forceinline__ unsigned unmasked(const Masks& mask, int p) const {
    return Mem::kMasked ? mask[Mem::kMasked ? p : 0] : exists(p) ? locate(p).inside() : 0;
  }

  __device__ __forceinline__ void read(Packs& raw) const {
    const PackPointers<Row, const In, kLanes> first(mem.in(0), row, rank), last(mem.in(kInputs - 1), row, rank);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const auto location = locate(p);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (!Row::kExact || (p + 1) * kLanes > Row::kPacks) raw[p][k] = Mem::pad_pack(k);
        if (exists(p) && location.any()) {
          raw[p][k] = Mem::load((k == 0 ? first : last)(p, location), Mem::kPacks ? Mem::kAll : location.inside());
        }
      }
    }
  }
  // Puts pads into the packs, and caches them.
  __device__ __forceinline__ void cache(Cached& cached, Masks& mask, Packs& raw) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (Mem::kMasked) {
        const auto location = locate(p);
        mask[p] = exists(p) ? mem.unmasked(location, location.inside()) : 0;
      }
      if constexpr (!Row::kExact || Mem::kMasked) {
        if ((Mem::kMasked || !locate(p).whole()) && unmasked(mask, p) != Mem::kAll)
          Mem::put_pads(raw[p], unmasked(mask, p));
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) mem.cache(cached[p], raw[p], locate(p), unmasked(mask, p));
  }
  // The state of the warp's packs of the row.
  __device__ __forceinline__ StateOf<Op> warp_state(Terms& terms, const Cached& cached, const Masks& mask) const {
    C pivot = M::constant(0);
    if constexpr (Op::kHasPivot) {
      MaxOfPacks<Mem> largest;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) largest.add(mem, cached[p], locate(p), unmasked(mask, p));
      pivot = RowTeam::warp_max(largest.get());
    }
    const auto terms_of_row = mem.terms(pivot, row.begin);
    typename Op::Sum sum{};
    // Where several warps share a row, arithmetic takes longer than memory: a warp skips its last packs if all are
    // beyond the row's end.
    constexpr bool kMayEnd = !Row::kExact && RowTeam::kBlock;
    const bool ends = kMayEnd && !__any_sync(kFullWarp, exists(kPacks - 1) && locate(kPacks - 1).any());
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (kMayEnd && p == kPacks - 1 && ends) break;
      typename Mem::Values values;
      mem.values(values, cached[p], locate(p), unmasked(mask, p));
      typename Op::Sum part{};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const auto term = Op::term(terms_of_row, values[i]);
        if constexpr (kKeepsTerms) terms[p][i] = term;
        part += term;
      }
      sum += part;
    }
    return {pivot, RowTeam::warp_sum(sum)};
  }
};

template <class Mem, class Plan>
__device__ __forceinline__ void registers(const typename Mem::Operands& operands) {
  using Op = typename Mem::Op;
  using Lane = RowOfLane<Mem, Plan>;
  using Row = typename Lane::Row;
  constexpr Registers kPlan = Plan::kPlan;
  constexpr int kWidth = Mem::kWidth;
  const Mem mem{operands};
  // The last block's idle teams repeat the last row and store nothing.
  const int64_t team = static_cast<int64_t>(blockIdx.x) * kPlan.rows_of_block() + threadIdx.x / kPlan.lanes;
  const bool active = kPlan.lanes == kPlan.threads || team < operands.rows;
  const int64_t index = Mem::row_of_launch(active ? team : operands.rows - 1, operands.rows);
  const Row row(index);
  const Lane lane{mem, row};

  typename Lane::Packs raw;
  lane.read(raw);
  // Read early, unless a block has one row: all of its warps would wait for the lane that needs the element.
  constexpr bool kLabelFirst = kPlan.lanes <= 32;
  typename Mem::LabelElement label_element{};
  if constexpr (kLabelFirst) label_element = mem.label_element(row.begin);
  const auto addend = mem.addend(row.begin);
  typename Lane::Masks mask = {};
  typename Lane::Cached cached;
  lane.cache(cached, mask, raw);
  typename Lane::Terms terms;
  const StateOf<Op> warp = lane.warp_state(terms, cached, mask), state = Lane::RowTeam::combine(warp);
  if (!active) return;
  if (lane.rank == 0) mem.store_row(index, state, kLabelFirst ? label_element : mem.label_element(row.begin));
  if constexpr (!Op::kElementResults) return;
  const auto finished = mem.finished(state, row.begin);
  typename Op::Scale scale{};
  if constexpr (Lane::kKeepsTerms) scale = mem.term_scale(state, warp.pivot, row.begin);
  const PackPointers<Row, typename Mem::Out, kPlan.lanes> out(mem.out(), row, lane.rank);
#pragma unroll
  for (int p = 0; p < kPlan.packs; ++p) {
    if (!lane.exists(p)) continue;
    const auto location = lane.locate(p);
    typename Mem::C result[kWidth];
    if constexpr (Lane::kKeepsTerms) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result[i] = terms[p][i] * scale;
    } else {
      typename Mem::Values values;
      mem.values(values, cached[p], location, lane.unmasked(mask, p));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result[i] = Op::finish(finished, values[i]);
    }
    const bool counts = Mem::mask_and_add(result, lane.unmasked(mask, p), addend, location.column());
    mem.store(out(p, location), location.offsets.element, result, counts, location, location.inside());
  }
}

}  // namespace jax_softmax::device
