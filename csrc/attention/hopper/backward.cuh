// backward.cuh's kernels of dk and dv and of dq on Hopper: the same steps and functions, with products by `wgmma` and
// copies by tensor maps. p and dx are operands of products from registers, and are never in memory.
#pragma once

#include "attention/backward.cuh"
#include "attention/hopper/pipeline.cuh"

namespace jax_softmax::device {

// Calls f(step) for the steps of the warpgroup, and skip() for the others of the block, which it does not visit.
template <class Pipe, class F, class G>
__device__ __forceinline__ void for_own_steps(Pipe& pipe, const Range& range, const Range& own, const F& f,
                                              const G& skip) {
  int step = range.first;
  const auto is_read = [&] {
    arrive_for_warp(pipe.d_is_read());
    arrive_for_warp(pipe.e_is_read());
    ++step, ++pipe.count;
  };
  const auto skip_until = [&](int end) {
    while (step < end) {
      wait(pipe.has_d(), pipe.parity());
      wait(pipe.has_e(), pipe.parity());
      skip();
      is_read();
    }
  };
  skip_until(min(own.first, range.last));
  while (step < own.last) {
    f(step);
    is_read();
  }
  skip_until(range.last);
}

// Begins s = q k^T and t = do v^T, or both transposed, or one of them, of those of the rows that stay from `own` on.
template <class T, bool of_s = true, bool of_t = true, class Pipe, int step>
__device__ __forceinline__ void begin_scores(Accumulators<1, step>& s, Accumulators<1, step>& t, const Pipe& pipe,
                                             int own) {
  wait(pipe.has_d(), pipe.parity());
  if constexpr (of_s) {
    fence_products();
    begin_product_of_rows<T>(s, pipe.own_d(), own, pipe.d());
    commit_products();
  }
  wait(pipe.has_e(), pipe.parity());
  if constexpr (of_t) {
    fence_products();
    begin_product_of_rows<T>(t, pipe.own_e(), own, pipe.e());
    commit_products();
  }
}

// dk and dv of the 64 keys of a warpgroup, or one of them. Where two warpgroups have the same keys, that of dv
// multiplies s, and that of dk reads it. Otherwise warpgroups take turns: in one a warpgroup adds to dv and dk, and
// multiplies the rows of its next step, while others differentiate.
template <class P, bool makes_dk, bool makes_dv>
__device__ __forceinline__ void keys_of_warpgroup(const typename P::Addresses& operands, unsigned n, int block) {
  using T = typename P::T;
  using N = Counts<P>;
  using Pipe = Pipeline<P, KernelKind::kKeys>;
  constexpr bool kMakesOne = !makes_dk || !makes_dv;
  const int warpgroup = own_warpgroup(), first = block * N::kRows;
  const int own = warpgroup / N::kTiling.same_rows, row = own * kRowsOfWarpgroup;
  const int row_of_warp = first_row_of_warp(kMma) - (warpgroup - own) * kRowsOfWarpgroup;
  Accumulators<1, N::kStep> s, t;
  Accumulators<1, attention::hopper_width(P::kFeatures)> dk;
  Accumulators<1, attention::hopper_width(P::kValueFeatures)> dv;
  RowSums<P, 1> sums;
  Pipe pipe;
  const auto own_turn = [&] { take_turn(warpgroup); };
  const auto next_turn = [&] { give_turn((warpgroup + 1) % Pipe::kWarpgroups); };
  if (warpgroup == Pipe::kWarpgroups - 1) next_turn();  // the first one is that of warpgroup 0
  if (!kMakesOne) own_turn();
  for (int group = 0; group < P::kGroups; ++group) {
    const SideOffsets<P> sides(operands, n + group);
    const Range range = visited<P>(operands, n + group, block, P::kKeys, P::kQueries);
    const Range own_range =
        visited<P, kRowsOfWarpgroup>(operands, n + group, first / kRowsOfWarpgroup + own, P::kKeys, P::kQueries);
    const auto multiply = [&](int step) {
      begin_scores<T, makes_dv, makes_dk>(s, t, pipe, row);
      if constexpr (makes_dv) wait_for_products(s.values[0]);
      if constexpr (kMakesOne) {
        own_turn();
        pipe.template hand_on<makes_dv>(s);
      }
      if constexpr (makes_dk) wait_for_products(t.values[0]);
      next_turn();
      const typename Pipe::Tile tile = pipe.tile(sides, block, step);
      for_tile<P>(own_range.is_whole(step), [&](auto is_whole) {
        differentiate_keys<P, decltype(is_whole)::kValue>(s, t, sums, tile, pipe.numbers(), row_of_warp + own_row());
      });
      uint32_t p[N::kStep / kMma][4], dx[N::kStep / kMma][4];
      narrow<T>(p, s);
      narrow<T>(dx, t);
      if (!kMakesOne) own_turn();
      fence_products();
      if constexpr (makes_dv) begin_product<T>(dv, p, pipe.e());
      if constexpr (makes_dk) begin_product<T>(dk, dx, pipe.d());
      commit_products();
      if constexpr (makes_dv) wait_for_products(dv.values[0]);
      if constexpr (makes_dk) wait_for_products(dk.values[0]);
    };
    for_own_steps(pipe, range, own_range, multiply, [&] { next_turn(), own_turn(); });
  }
  if (!kMakesOne) next_turn();

  if constexpr (makes_dk) {
    write(operand_of<P>(operands, P::kFirstResult, P::kK, n), P::kK.j, dk, first + row_of_warp, P::kKeys, 0,
          P::kFeatures, narrowed<T>);
    sums.write(operands, 2, n / P::kGroups, first + row_of_warp + own_row(), P::kKeys);
  }
  if constexpr (makes_dv) {
    write(operand_of<P>(operands, P::kFirstResult + 1, P::kV, n), P::kV.j, dv, first + row_of_warp, P::kKeys, 0,
          P::kValueFeatures, narrowed<T>);
  }
}

template <class P>
__device__ __forceinline__ void attention_keys_on_hopper(const typename P::Addresses& operands) {
  using N = Counts<P>;
  using Pipe = Pipeline<P, KernelKind::kKeys>;

  const BlockIndex own = own_block<P>(ceil_div(P::kKeys, N::kRows), P::kGroups);
  const int block = own.row_block;
  const unsigned n = own.n;  // the first that has these keys
  if (!Pipe::computes(operands, n, block)) return;
  if constexpr (N::kTiling.same_rows == 1) {
    keys_of_warpgroup<P, true, true>(operands, n, block);
  } else if (own_warpgroup() % 2 == 0) {
    keys_of_warpgroup<P, false, true>(operands, n, block);
  } else {
    keys_of_warpgroup<P, true, false>(operands, n, block);
  }
}

template <class P>
__device__ __forceinline__ void attention_queries_on_hopper(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  using Pipe = Pipeline<P, KernelKind::kQueries>;
  constexpr int kBlocks = ceil_div(P::kQueries, N::kRows);

  const BlockIndex own = own_block<P>(kBlocks);
  const int block = kBlocks - 1 - own.row_block, first = block * N::kRows, warpgroup = own_warpgroup();
  const unsigned n = own.n;
  if (!Pipe::computes(operands, n, block)) return;

  const int row_of_warp = first_row_of_warp(kMma), own_row_of_tile = row_of_warp + own_row();
  const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
  const Range own_range =
      visited<P, kRowsOfWarpgroup>(operands, n, block * Pipe::kWarpgroups + warpgroup, P::kQueries, P::kKeys);
  const SideOffsets<P> sides(operands, n);
  RowNumbers rows[1][2];
  read_numbers<P>(rows, operands, n, first + own_row_of_tile);
  Accumulators<1, N::kStep> s, t, y;
  Accumulators<1, attention::hopper_width(P::kFeatures)> dq;
  RowSums<P, 1> sums;
  const Written<P> written{operand_of<P, typename P::Written>(operands, P::kFirstResult + 1, P::kWrittenStrides, n)};
  Pipe pipe;
  const auto multiply = [&](int step) {
    begin_scores<T>(s, t, pipe, warpgroup * kRowsOfWarpgroup);
    const typename Pipe::Tile tile = pipe.tile(sides, block, step);
    wait_for_products<1>(s.values[0]);  // do v^T is computed meanwhile
    const auto softmax = softmax_of_each<P>(s, rows);
    for_tile<P>(own_range.is_whole(step), [&](auto is_whole) {
      each_score<P, decltype(is_whole)::kValue, 1, N::kStep>(
          tile, own_row_of_tile, 0,
          [&](int m, int c, int e, const auto& side, bool) { y.values[m][c][e] = softmax(m, c, e, side); });
    });
    wait_for_products(t.values[0]);
    for_tile<P>(own_range.is_whole(step), [&](auto is_whole) {
      differentiate_rows<P, decltype(is_whole)::kValue>(
          s, t, tile, rows, own_row_of_tile, sums, written,
          [&](int m, int c, int e, const auto&) { return y.values[m][c][e]; });
    });
    uint32_t dx[N::kStep / kMma][4];
    narrow<T>(dx, t);
    fence_products();
    begin_product<T>(dq, dx, pipe.d());
    commit_products();
    wait_for_products(dq.values[0]);
  };
  for_own_steps(pipe, range, own_range, multiply, [] {});

  if constexpr (P::kWrites) {
    written.template write_zeros<kRowsOfWarpgroup>(first + warpgroup * kRowsOfWarpgroup, own_range);
  }
  sums.write(operands, 1 + P::kWrites, n, first + own_row_of_tile, P::kQueries);
  write(operand_of<P>(operands, P::kFirstResult, P::kQ, n), P::kQ.i, dq, first + row_of_warp, P::kQueries, 0,
        P::kFeatures, narrowed<T>);
}

}  // namespace jax_softmax::device
