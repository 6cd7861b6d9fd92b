// forward.cuh's kernel on Hopper: the same steps and functions, with products by `wgmma` and copies by tensor maps.
// Warpgroups take turns in multiplying keys, so that the others compute weights or multiply values meanwhile.
#pragma once

#include "attention/forward.cuh"
#include "attention/hopper/pipeline.cuh"

namespace jax_softmax::device {

template <class P>
__device__ __forceinline__ void attention_forward_on_hopper(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  using Pipe = Pipeline<P, KernelKind::kForward>;
  constexpr int kWarpgroups = Pipe::kWarpgroups, kBlocks = ceil_div(P::kQueries, N::kRows);
  constexpr int kWidth = attention::hopper_width(P::kValueFeatures);

  const BlockIndex own = own_block<P>(kBlocks);
  const int block = kBlocks - 1 - own.row_block, first = block * N::kRows, warpgroup = own_warpgroup();
  const unsigned n = own.n;
  if (!Pipe::computes(operands, n, block)) return;

  const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
  const Range own_range =
      visited<P, kRowsOfWarpgroup>(operands, n, block * kWarpgroups + warpgroup, P::kQueries, P::kKeys);
  const int row_of_warp = first_row_of_warp(kMma), own_row_of_tile = row_of_warp + own_row();
  const SideOffsets<P> sides(operands, n);
  Accumulators<1, N::kStep> s;
  Accumulators<1, kWidth> o;
  RowState rows[1][2];
  Pipe pipe;
  int step = range.first;
  const auto next_turn = [&] { give_turn((warpgroup + 1) % kWarpgroups); };
  if (warpgroup == kWarpgroups - 1) next_turn();  // the first one is that of warpgroup 0
  const auto skip_until = [&](int end) {          // steps that other warpgroups visit
    for (; step < end; ++step, ++pipe.count) {
      wait(pipe.has_d(), pipe.parity());
      take_turn(warpgroup);
      next_turn();
      arrive_for_warp(pipe.d_is_read());
      wait(pipe.has_e(), pipe.parity());
      arrive_for_warp(pipe.e_is_read());
    }
  };
  skip_until(min(own_range.first, range.last));
  for (; step < own_range.last; ++step, ++pipe.count) {
    wait(pipe.has_d(), pipe.parity());
    take_turn(warpgroup);
    fence_products();
    begin_product_of_rows<T>(s, pipe.own_d(), warpgroup * kRowsOfWarpgroup, pipe.d());
    commit_products();
    wait_for_products(s.values[0]);
    next_turn();
    arrive_for_warp(pipe.d_is_read());

    const typename Pipe::Tile tile = pipe.tile(sides, block, step);
    if (Pipe::kHasSides) wait(pipe.has_e(), pipe.parity());
    for_tile<P>(own_range.is_whole(step),
                [&](auto is_whole) { score<P, decltype(is_whole)::kValue>(s, tile, own_row_of_tile); });
    accumulate(s, rows, [&](int m, int half, float factor) { rescale_row(o, m, half, factor); });
    for_tile<P>(own_range.is_whole(step), [&](auto is_whole) {
      using Own = ScoreSides<P, typename Pipe::Tile, decltype(is_whole)::kValue>;
      s.each([&](float& y, int row, int column) {
        y = P::weight(y, Own{tile, own_row_of_tile + row, own_column() + column});
      });
    });
    uint32_t p[N::kStep / kMma][4];
    narrow<T>(p, s);
    if (!Pipe::kHasSides) wait(pipe.has_e(), pipe.parity());
    fence_products();
    begin_product<T>(o, p, pipe.e());
    commit_products();
    wait_for_products(o.values[0]);
    arrive_for_warp(pipe.e_is_read());
  }
  skip_until(range.last);

  float factors[1][2];
  finish<P>(operands, n, first + row_of_warp, o, rows, factors);
}

}  // namespace jax_softmax::device
