// The schedule `registers`: a row in the registers of a team of lanes, several packs a lane, all loads first. Packs are
// kept as they are in memory, or as their terms if the result is made of those.
#pragma once

#include "device/reduce.cuh"
#include "device/row.cuh"
#include "geometry/registers.h"

namespace jax_softmax::device {

template <class Mem, class Plan>
__device__ __forceinline__ void registers(const typename Mem::Operands& operands) {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using Row = RowPacks<Mem, Plan>;
  constexpr Registers kPlan = Plan::kPlan;
  constexpr int kPacks = kPlan.packs, kLanes = kPlan.lanes, kWidth = Mem::kWidth, kInputs = Mem::kInputs;
  using RowTeam = Team<Op, kLanes, kPlan.threads>;
  const Mem mem{operands};

  // The last block's idle teams repeat the last row and store nothing.
  const int64_t team = static_cast<int64_t>(blockIdx.x) * kPlan.rows_of_block() + threadIdx.x / kLanes;
  const bool active = kLanes == kPlan.threads || team < operands.rows;
  const int64_t index = mem.row_of_launch(active ? team : operands.rows - 1);
  const Row row(index);
  const int rank = RowTeam::rank();
  const auto pack_of = [&](int p) { return rank + p * kLanes; };
  // Whether a pack is the row's at all: most are for all lanes, which the compiler then knows.
  const auto exists = [&](int p) { return (p + 1) * kLanes <= Row::kPacks || pack_of(p) < Row::kPacks; };

  Pack raw[kPacks][kInputs];
  const PackPointers<Row, const In, kLanes> first(mem.in(0), row, rank), last(mem.in(kInputs - 1), row, rank);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const auto at = row.at(pack_of(p));
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (!Row::kExact || (p + 1) * kLanes > Row::kPacks) raw[p][k] = Mem::pad_pack(k);
      if (exists(p) && at.any()) {
        raw[p][k] = Mem::load((k == 0 ? first : last)(p, at), Mem::kPacks ? Mem::kAll : at.inside());
      }
    }
  }
  constexpr bool kLabelFirst = kLanes <= 32;  // in a block of one row others would wait for the lane that needs it
  typename Mem::LabelElement label_element{};
  if constexpr (kLabelFirst) label_element = mem.label_element(row.begin);
  const auto addend = mem.addend(row.begin);
  unsigned unmasked[Mem::kMasked ? kPacks : 1] = {};
  const auto unmasked_of = [&](int p) {
    return Mem::kMasked ? unmasked[Mem::kMasked ? p : 0] : exists(p) ? row.at(pack_of(p)).inside() : 0;
  };
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if constexpr (Mem::kMasked) {
      const auto at = row.at(pack_of(p));
      unmasked[p] = exists(p) ? mem.unmasked(at, at.inside()) : 0;
    }
    if constexpr (!Row::kExact || Mem::kMasked) {
      if ((Mem::kMasked || !row.at(pack_of(p)).whole()) && unmasked_of(p) != Mem::kAll)
        Mem::put_pads(raw[p], unmasked_of(p));
    }
  }
  typename Mem::Cached cached[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) mem.cache(cached[p], raw[p], row.at(pack_of(p)), unmasked_of(p));

  constexpr bool kKeepsTerms = Op::kResultIsScaledTerm;
  C terms[kKeepsTerms ? kPacks : 1][kWidth];
  C pivot = M::constant(0);
  if constexpr (Op::kHasPivot) {
    MaxOfPacks<Mem> largest;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) largest.add(mem, cached[p], row.at(pack_of(p)), unmasked_of(p));
    pivot = RowTeam::warp_max(largest.get());
  }
  const auto terms_of_row = mem.terms(pivot, row.begin);
  typename Op::Sum sum{};
  // Teams of several warps wait for arithmetic first: a warp leaves out what is all beyond the row.
  constexpr bool kMayEnd = !Row::kExact && RowTeam::kBlock;
  const bool ends = kMayEnd && !__any_sync(kFullWarp, exists(kPacks - 1) && row.at(pack_of(kPacks - 1)).any());
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (kMayEnd && p == kPacks - 1 && ends) break;
    typename Mem::Values values;
    mem.values(values, cached[p], row.at(pack_of(p)), unmasked_of(p));
    typename Op::Sum part{};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto term = Op::term(terms_of_row, values[i]);
      if constexpr (kKeepsTerms) terms[p][i] = term;
      part += term;
    }
    sum += part;
  }
  const StateOf<Op> state = RowTeam::combine({pivot, RowTeam::warp_sum(sum)});
  if (!active) return;
  if (rank == 0) mem.store_row(index, state, kLabelFirst ? label_element : mem.label_element(row.begin));
  if constexpr (!Op::kElementResults) return;

  const typename Op::Finished finished = mem.finished(state, row.begin);
  typename Op::Scale scale{};
  if constexpr (kKeepsTerms) scale = mem.term_scale(state, pivot, row.begin);
  const PackPointers<Row, typename Mem::Out, kLanes> out(mem.out(), row, rank);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (!exists(p)) continue;
    const auto at = row.at(pack_of(p));
    C result[kWidth];
    if constexpr (kKeepsTerms) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result[i] = terms[p][i] * scale;
    } else {
      typename Mem::Values values;
      mem.values(values, cached[p], at, unmasked_of(p));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result[i] = Op::finish(finished, values[i]);
    }
    const bool counts = Mem::mask_and_add(result, unmasked_of(p), addend, at.column());
    mem.store(out(p, at), at.place.element, result, counts, at, at.inside());
  }
}

}  // namespace jax_softmax::device
