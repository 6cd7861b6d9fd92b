// The output's tangent beside the output, given those of queries, keys and values. With x = q k^T and its tangent
// x' = q' k^T + q k'^T, scores s = score(x) have the tangents s' = score_tangent(x', x), and weights p of a row
//
//   p' = p (s' - delta),  delta = sum of p s'
//   o' = weight(p') v + weight(p) v' = (weight(p s') v + weight(p) v') - delta o
//
// All of it is made in the pass in which o is: the sum in brackets and delta are rescaled as o is, and divided in the
// end.
#pragma once

#include "attention/forward.cuh"

namespace jax_softmax::device {

// Replaces products x by scores, and their tangents by those of scores. `row`: the thread's first one in the tile.
template <class P, bool is_whole, class Tile, int fragments, int step>
__device__ __forceinline__ void score_with_tangents(Accumulators<fragments, step>& s,
                                                    Accumulators<fragments, step>& tangents, const Tile& tile,
                                                    int row) {
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int c = 0; c < step / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = c * 8 + own_column() + e % 2;
        const ScoreSides<P, Tile, is_whole> side{tile, row + m * kMma + e / 2 * 8, column};
        float &x = s.values[m][c][e], &tangent = tangents.values[m][c][e];
        tangent = P::score_tangent(tangent, x, side);
        x = P::score(x, side);
        if (!is_whole && P::kKeys % step != 0 && tile.j + column >= P::kKeys) {
          x = -kInfinity;
          tangent = 0.0f;
        }
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void attention_tangents(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  using Rows = SharedRows<T, N::kDepth>;
  using Stage = SharedRowPair<P, N::kStep>;
  using Tile = ScoreTile<P, N::kRows, N::kStep>;
  constexpr int kBlocks = ceil_div(P::kQueries, N::kRows), kStageBytes = 2 * Stage::kBytes + Tile::kStagedBytes;

  const BlockIndex own = own_block<P>(kBlocks);
  const int block = kBlocks - 1 - own.row_block, first = block * N::kRows;
  const unsigned n = own.n;
  const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
  const Rows q{shared_memory()}, q_tangent{q.base + N::kRows * Rows::kBytes};
  const SideOffsets<P> sides(operands, n);
  Places places(q_tangent.base + N::kRows * Rows::kBytes, kStageBytes);
  const auto tangents_of = [](Stage stage) { return Stage(stage.d.base + Stage::kBytes); };
  const auto tile_of = [&](Address place, int step) {
    return Tile{sides, place + 2 * Stage::kBytes, first, step * N::kStep};
  };
  const auto begin_keys = [&](Stage to, int step, int k, int v) {
    begin_copy_of_rows<P, N::kStep, P::kKeys, P::kFeatures>(to.d, operand_of<P>(operands, k, P::kK, n), P::kK.j,
                                                            step * N::kStep);
    begin_copy_of_rows<P, N::kStep, P::kKeys, P::kValueFeatures>(to.e, operand_of<P>(operands, v, P::kV, n), P::kV.j,
                                                                 step * N::kStep);
  };
  const auto begin_step = [&](Address to, int step) {
    if (step < range.last) {
      begin_keys(Stage(to), step, attention::kK, attention::kV);
      begin_keys(tangents_of(Stage(to)), step, attention::kKTangent, attention::kVTangent);
      tile_of(to, step).begin_copies();
    }
    commit_copies();
  };

  begin_copy_of_rows<P, N::kRows, P::kQueries, P::kFeatures>(q, operand_of<P>(operands, attention::kQ, P::kQ, n),
                                                             P::kQ.i, first);
  begin_copy_of_rows<P, N::kRows, P::kQueries, P::kFeatures>(
      q_tangent, operand_of<P>(operands, attention::kQTangent, P::kQ, n), P::kQ.i, first);
  begin_step(places.read, range.first);

  const int row_of_warp = first_row_of_warp(N::kRowsOfWarp), own_row_of_tile = row_of_warp + own_row();
  Accumulators<N::kFragments, N::kWidth> o, o_tangent;
  Accumulators<N::kFragments, 8> deltas;  // of each row's columns, to be added up
  RowState rows[N::kFragments][2];
  wait_for_all_but_last<0>();
  round_own_packs<P, N::kRows>(q);
  round_own_packs<P, N::kRows>(q_tangent);
  for (int step = range.first; step < range.last; ++step) {
    const Stage keys(places.read), key_tangents = tangents_of(keys);
    wait_for_all_but_last<0>();
    keys.round_own_packs();
    key_tangents.round_own_packs();
    barrier();  // this stage is there, and nobody reads the one before any more
    begin_step(places.copied, step + 1);
    Accumulators<N::kFragments, N::kStep> s, t;
    add_product_of_rows(s, q, row_of_warp, keys.d);
    add_product_of_rows(t, q_tangent, row_of_warp, keys.d);
    add_product_of_rows(t, q, row_of_warp, key_tangents.d);
    const Tile tile = tile_of(places.read, step);
    for_tile<P>(range.is_whole(step), [&](auto is_whole) {
      score_with_tangents<P, decltype(is_whole)::kValue>(s, t, tile, own_row_of_tile);
    });
    accumulate(s, rows, [&](int m, int half, float factor) {
      rescale_row(o, m, half, factor);
      rescale_row(o_tangent, m, half, factor);
      rescale_row(deltas, m, half, factor);
    });
    for_tile<P>(range.is_whole(step), [&](auto is_whole) {
#pragma unroll
      for (int m = 0; m < N::kFragments; ++m) {
#pragma unroll
        for (int c = 0; c < N::kStep / 8; ++c) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const ScoreSides<P, Tile, decltype(is_whole)::kValue> side{tile, own_row_of_tile + m * kMma + e / 2 * 8,
                                                                       c * 8 + own_column() + e % 2};
            float &y = s.values[m][c][e], &tangent = t.values[m][c][e];
            tangent *= y;
            deltas.values[m][0][e] += tangent;
            tangent = P::weight(tangent, side);
            y = P::weight(y, side);
          }
        }
      }
    });
    add_product(o, s, keys.e);
    add_product(o_tangent, t, keys.e);
    add_product(o_tangent, s, key_tangents.e);
    places.exchange();
  }
  wait_for_all_but_last<0>();

  float factors[N::kFragments][2];
  const int row = first + row_of_warp;
  finish<P>(operands, n, row, o, rows, factors);
#pragma unroll
  for (int m = 0; m < N::kFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const of_row = deltas.values[m][0] + 2 * half;
      const float delta = sum_of_row(of_row[0] + of_row[1]) / sum_of_row(rows[m][half].sum);
      rescale_row(o_tangent, m, half, factors[m][half]);
#pragma unroll
      for (int c = 0; c < N::kWidth / 8; ++c) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          if (factors[m][half] != 0.0f) o_tangent.values[m][c][e] -= delta * o.values[m][c][e];
        }
      }
    }
  }
  write(operand_of<P>(operands, P::kFirstResult + 2 + (P::kLostShift > 0), P::kO, n), P::kO.i, o_tangent, row,
        P::kQueries, 0, P::kValueFeatures, narrowed<T>);
}

}  // namespace jax_softmax::device
