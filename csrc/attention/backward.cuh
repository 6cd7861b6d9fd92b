// The gradients of o = weight(softmax(score(q k^T))) v, given its cotangent, the rows' numbers and
// delta = rowsum(o * do):
//
//   p = exp(score(x) - pivot) / sum,  x = q k^T
//   dv = weight(p)^T do
//   dx = score_transposed(p * (weight_transposed(do v^T) - delta))
//   dk = dx^T q,  dq = dx k
//
// in two kernels, which both compute p and dx: so no sums are added up in memory, and their order is always the same.
#pragma once

#include "attention/tiles.cuh"

namespace jax_softmax::device {

// dk and dv: a block has Tiling::rows() keys, and the queries of all batch indices that share the keys pass. Products
// have keys as rows, so that p^T and dx^T are operands of the next products without a transposition.
template <class P>
__device__ __forceinline__ void attention_keys(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  constexpr int kStep = N::kStep, kFragments = N::kFragments, kParts = N::kTiling.parts;
  constexpr int kOwnDepth = N::kDepth / kParts, kOwnWidth = N::kWidth / kParts;
  constexpr int kBlocks = ceil_div(P::kKeys, N::kRows);
  using TileOfStep = ScoreTile<P, kStep, N::kRows>;
  using Stage = SharedRowPair<P, kStep>;

  const BlockIndex own_index = own_block<P>(kBlocks * kParts, P::kGroups);
  const int block = own_index.row_block % kBlocks, part = own_index.row_block / kBlocks;
  const unsigned n = own_index.n;  // the first that has these keys

  // The queries of each batch index of the group pass in turn.
  struct Walk {
    int group, step;
    Range range;
  };
  const auto enter = [&](Walk& walk) {
    for (; walk.group < P::kGroups; ++walk.group) {
      walk.range = visited<P>(operands, n + walk.group, block, P::kKeys, P::kQueries);
      walk.step = walk.range.first;
      if (walk.step < walk.range.last) return;
    }
  };
  const auto advance = [&](Walk& walk) {
    if (++walk.step < walk.range.last) return;
    ++walk.group;
    enter(walk);
  };

  const SharedRowPair<P, N::kRows> own(shared_memory());
  // A stage has its rows, their numbers, their deltas, and then the side operands that pass.
  constexpr int kOfRows = Stage::kBytes + kStep * attention::kBytesOfRow;
  const auto stage_of = [&](int count) {
    return Stage(own.d.base + own.kBytes + count % kStages * (kOfRows + TileOfStep::kStagedBytes));
  };
  const auto numbers_of = [](Stage stage, int row) { return stage.d.base + stage.kBytes + 8 * row; };
  const auto delta_of = [&](Stage stage, int row) { return numbers_of(stage, kStep) + 4 * row; };
  const int first = block * N::kRows, row_of_warp = first_row_of_warp(N::kRowsOfWarp);
  const auto tile_of = [&](const Walk& walk, Stage stage, const SideOffsets<P>& sides) {
    return TileOfStep{sides, stage.d.base + kOfRows, walk.step * kStep, first};
  };
  const auto begin_queries = [&](const Walk& walk, Stage stage) {
    if (walk.group < P::kGroups) {
      const unsigned batch = n + walk.group;
      const int first_query = walk.step * kStep, row = threadIdx.x;
      tile_of(walk, stage, SideOffsets<P>(operands, batch)).begin_copies();
      const T* const q = operand_of<P>(operands, attention::kQ, P::kQ, batch);
      const T* const o_cotangent = operand_of<P>(operands, attention::kOCotangent, P::kO, batch);
      begin_copy_of_rows<P, kStep, P::kQueries, P::kFeatures>(stage.d, q, P::kQ.i, first_query);
      begin_copy_of_rows<P, kStep, P::kQueries, P::kValueFeatures>(stage.e, o_cotangent, P::kO.i, first_query);
      if (row < kStep) {
        const bool exists = first_query + row < P::kQueries;
        const int64_t from = static_cast<int64_t>(batch) * P::kQueries + (exists ? first_query + row : 0);
        begin_copy<8>(numbers_of(stage, row),
                      static_cast<const float*>(operands.address[attention::kNumbers]) + 2 * from, exists);
        begin_copy<4>(delta_of(stage, row), static_cast<const float*>(operands.address[attention::kDelta]) + from,
                      exists);
      }
    }
    commit_copies();
  };

  begin_copy_of_rows<P, N::kRows, P::kKeys, P::kFeatures>(own.d, operand_of<P>(operands, attention::kK, P::kK, n),
                                                          P::kK.j, first);
  begin_copy_of_rows<P, N::kRows, P::kKeys, P::kValueFeatures>(own.e, operand_of<P>(operands, attention::kV, P::kV, n),
                                                               P::kV.j, first);
  Walk walk{0, 0, {}};
  enter(walk);
  begin_queries(walk, stage_of(0));

  Accumulators<kFragments, kOwnDepth> dk;
  Accumulators<kFragments, kOwnWidth> dv;
  for (int count = 0; walk.group < P::kGroups; ++count) {
    wait_for_all_but_last<0>();
    barrier();  // this stage is there, and nobody reads the one before any more
    Walk next = walk;
    advance(next);
    begin_queries(next, stage_of(count + 1));
    const Stage stage = stage_of(count);
    Accumulators<kFragments, kStep> s, t;
    add_product_of_rows<T>(s, own.d, row_of_warp, stage.d);
    add_product_of_rows<T>(t, own.e, row_of_warp, stage.e);
    const SideOffsets<P> sides(operands, n + walk.group);
    const TileOfStep tile = tile_of(walk, stage, sides);
    for_tile<P>(walk.range.is_whole(walk.step), [&](auto is_whole) {
#pragma unroll
      for (int c = 0; c < kStep / 8; ++c) {
        float numbers[4], deltas[2];  // of two queries
        read_shared(numbers, numbers_of(stage, c * 8 + own_column()));
        read_shared(deltas, delta_of(stage, c * 8 + own_column()));
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = c * 8 + own_column() + e % 2, j = row_of_warp + m * kMma + own_row() + e / 2 * 8;
            const RowNumbers row{numbers[2 * (e % 2)], numbers[2 * (e % 2) + 1], deltas[e % 2]};
            const ScoreSides<P, TileOfStep, decltype(is_whole)::kValue> side{tile, i, j};
            differentiate<P>(s.values[m][c][e], t.values[m][c][e], row, side);
            if (!decltype(is_whole)::kValue && P::kQueries % kStep != 0 && tile.i + i >= P::kQueries) {
              s.values[m][c][e] = t.values[m][c][e] = 0.0f;
            }
          }
        }
      }
    });
    add_product<T>(dv, s, stage.e, part * kOwnWidth);
    add_product<T>(dk, t, stage.d, part * kOwnDepth);
    walk = next;
  }
  wait_for_all_but_last<0>();

  const auto as_it_is = [](int, int) { return 1.0f; };
  write(operand_of<P>(operands, P::kFirstResult, P::kK, n), P::kK.j, dk, first + row_of_warp, P::kKeys,
        part * kOwnDepth, P::kFeatures, as_it_is);
  write(operand_of<P>(operands, P::kFirstResult + 1, P::kV, n), P::kV.j, dv, first + row_of_warp, P::kKeys,
        part * kOwnWidth, P::kValueFeatures, as_it_is);
}

// Writes what `written` makes of the scores' cotangents, for a block's queries: two neighbours along keys at a time,
// and 0 in steps that the block does not visit.
template <class P>
struct Cotangents {
  using W = typename P::Written;
  W* to;
  int first;  // query

  __device__ __forceinline__ Cotangents(const typename P::Addresses& operands, unsigned n, int first)
      : to(operand_of<P, W>(operands, P::kFirstResult + 1, P::kWrittenStrides, n)), first(first) {}

  __device__ __forceinline__ void write(int i, int j, float a, float b) const {
    if (i >= P::kQueries || j >= P::kKeys) return;
    W* const at = to + i * P::kWrittenStrides.i + j;
    const bool two = P::kKeys % 2 == 0 || j + 1 < P::kKeys;
    if constexpr (sizeof(W) == 4) {
      at[0] = a;
      if (two) at[1] = b;
    } else if constexpr (P::kKeys % 2 == 0) {
      *reinterpret_cast<uint32_t*>(at) = narrowed<W>(a, b);
    } else {
      const uint32_t bits = narrowed<W>(a, b);
      uint16_t* const halves = reinterpret_cast<uint16_t*>(at);
      halves[0] = static_cast<uint16_t>(bits);
      if (two) halves[1] = static_cast<uint16_t>(bits >> 16);
    }
  }
  __device__ __forceinline__ void write_zeros(int begin, int end) const {
    const int pairs = (end - begin) / 2;
    for (int p = threadIdx.x; p < Counts<P>::kRows * pairs; p += Counts<P>::kThreads) {
      write(first + p / pairs, begin + p % pairs * 2, 0.0f, 0.0f);
    }
  }
};

// dq: a block has Tiling::rows() queries, and keys pass.
template <class P>
__device__ __forceinline__ void attention_queries(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  constexpr int kStep = N::kStep, kFragments = N::kFragments;
  constexpr int kBlocks = ceil_div(P::kQueries, N::kRows), kSteps = ceil_div(P::kKeys, kStep);
  using TileOfStep = ScoreTile<P, N::kRows, kStep>;
  using Stage = SharedRowPair<P, kStep>;

  const BlockIndex own_index = own_block<P>(kBlocks);
  const int block = kBlocks - 1 - own_index.row_block;
  const unsigned n = own_index.n;
  const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
  const T* const k = operand_of<P>(operands, attention::kK, P::kK, n);
  const T* const v = operand_of<P>(operands, attention::kV, P::kV, n);

  const SharedRowPair<P, N::kRows> own(shared_memory());
  const auto stage_of = [&](int step) {
    return Stage(own.d.base + own.kBytes + step % kStages * (Stage::kBytes + TileOfStep::kStagedBytes));
  };
  const int first = block * N::kRows, row_of_warp = first_row_of_warp(N::kRowsOfWarp);
  const SideOffsets<P> sides(operands, n);
  const auto tile_of = [&](int step) {
    return TileOfStep{sides, stage_of(step).d.base + Stage::kBytes, first, step * kStep};
  };
  const auto begin_keys = [&](int step) {
    if (step < range.last) {
      tile_of(step).begin_copies();
      begin_copy_of_rows<P, kStep, P::kKeys, P::kFeatures>(stage_of(step).d, k, P::kK.j, step * kStep);
      begin_copy_of_rows<P, kStep, P::kKeys, P::kValueFeatures>(stage_of(step).e, v, P::kV.j, step * kStep);
    }
    commit_copies();
  };

  begin_copy_of_rows<P, N::kRows, P::kQueries, P::kFeatures>(own.d, operand_of<P>(operands, attention::kQ, P::kQ, n),
                                                             P::kQ.i, first);
  begin_copy_of_rows<P, N::kRows, P::kQueries, P::kValueFeatures>(
      own.e, operand_of<P>(operands, attention::kOCotangent, P::kO, n), P::kO.i, first);
  begin_keys(range.first);

  const int own_row_of_tile = row_of_warp + own_row(), own_query = first + own_row_of_tile;
  RowNumbers rows[kFragments][2];
#pragma unroll
  for (int m = 0; m < kFragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = static_cast<int64_t>(n) * P::kQueries + min(own_query + m * kMma + half * 8, P::kQueries - 1);
      const float* const numbers = static_cast<const float*>(operands.address[attention::kNumbers]) + 2 * row;
      rows[m][half] = {numbers[0], numbers[1], static_cast<const float*>(operands.address[attention::kDelta])[row]};
    }
  }
  Accumulators<kFragments, N::kDepth> dq;
  const Cotangents<P> cotangents(operands, n, first);
  for (int step = range.first; step < range.last; ++step) {
    wait_for_all_but_last<0>();
    barrier();  // this stage is there, and nobody reads the one before any more
    begin_keys(step + 1);
    const Stage stage = stage_of(step);
    Accumulators<kFragments, kStep> s, t;
    add_product_of_rows<T>(s, own.d, row_of_warp, stage.d);
    add_product_of_rows<T>(t, own.e, row_of_warp, stage.e);
    const TileOfStep tile = tile_of(step);
    for_tile<P>(range.is_whole(step), [&](auto is_whole) {
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
#pragma unroll
        for (int c = 0; c < kStep / 8; ++c) {
          float pair[2];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = own_row_of_tile + m * kMma + e / 2 * 8, j = c * 8 + own_column() + e % 2;
            const ScoreSides<P, TileOfStep, decltype(is_whole)::kValue> side{tile, i, j};
            const float x0 = s.values[m][c][e];
            const float g = differentiate<P>(s.values[m][c][e], t.values[m][c][e], rows[m][e / 2], side);
            if (!decltype(is_whole)::kValue && P::kKeys % kStep != 0 && tile.j + j >= P::kKeys)
              t.values[m][c][e] = 0.0f;
            if constexpr (P::kWrites) {
              pair[e % 2] = P::written(g, x0, side);
              if (e % 2 == 1) cotangents.write(first + i, tile.j + j - 1, pair[0], pair[1]);
            }
          }
        }
      }
    });
    add_product<T>(dq, t, stage.d);
  }
  wait_for_all_but_last<0>();
  if constexpr (P::kWrites) {
    const int end = range.first < range.last ? range.first * kStep : kSteps * kStep;
    cotangents.write_zeros(0, end);
    if (range.first < range.last) cotangents.write_zeros(range.last * kStep, kSteps * kStep);
  }
  write(operand_of<P>(operands, P::kFirstResult, P::kQ, n), P::kQ.i, dq, first + row_of_warp, P::kQueries, 0,
        P::kFeatures, [](int, int) { return 1.0f; });
}

}  // namespace jax_softmax::device
