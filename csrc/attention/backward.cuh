// The gradients of o = weight(softmax(score(q k^T))) v, given its cotangent, the rows' numbers and
// delta = rowsum(o * do):
//
//   p = exp(score(x) - pivot) / sum,  x = q k^T
//   dv = weight(p)^T do
//   dx = score_transposed(p * (weight_transposed(do v^T) - delta))
//   dk = dx^T q,  dq = dx k
//
// in two kernels, which both compute p and dx: so no sums are added up in memory, and their order is always the same.
//
// Whatever else scores read has a cotangent as well, ds for a bias. What the program sums over keys is summed in dq's
// kernel, what it sums over queries in that of dk and dv, and what it sums over the batch in a third one.
#pragma once

#include "attention/scores.cuh"

namespace jax_softmax::device {

// The queries that pass a block of keys, step by step: for each batch index that shares the keys in turn, its queries.
// What passes in a step is in shared memory, in one of two places: the rows, their numbers, their deltas, and then the
// side operands of their scores.
template <class P>
struct PassingQueries {
  using N = Counts<P>;
  using T = typename P::T;
  using Tile = ScoreTile<P, N::kStep, N::kRows>;
  using Stage = SharedRowPair<P, N::kStep>;
  static constexpr int kOfRows = Stage::kBytes + N::kStep * attention::kBytesOfRow;
  static constexpr int kBytes = kOfRows + Tile::kStagedBytes;

  const typename P::Addresses& operands;
  unsigned n;  // the first batch index that has these keys
  int block;   // of keys

  // Step `step` of the queries of batch index n + group.
  struct Position {
    int group, step;
    Range range;
    __device__ __forceinline__ bool exists() const { return group < P::kGroups; }
  };
  __device__ __forceinline__ Position first_position() const {
    Position at{0, 0, {}};
    enter(at);
    return at;
  }
  __device__ __forceinline__ Position after(Position at) const {
    if (++at.step < at.range.last) return at;
    ++at.group;
    enter(at);
    return at;
  }
  __device__ __forceinline__ void enter(Position& at) const {
    for (; at.group < P::kGroups; ++at.group) {
      at.range = visited<P>(operands, n + at.group, block, P::kKeys, P::kQueries);
      at.step = at.range.first;
      if (at.step < at.range.last) return;
    }
  }

  static __device__ __forceinline__ Address numbers(Stage stage) { return stage.d.base + stage.kBytes; }
  __device__ __forceinline__ Tile tile(const Position& at, Stage stage, const SideOffsets<P>& sides) const {
    return Tile{sides, stage.d.base + kOfRows, at.step * N::kStep, block * N::kRows};
  }
  __device__ __forceinline__ void begin_copies(const Position& at, Stage stage) const {
    if (!at.exists()) return;
    const unsigned batch = n + at.group;
    const int first = at.step * N::kStep;
    tile(at, stage, SideOffsets<P>(operands, batch)).begin_copies();
    const T* const q = operand_of<P>(operands, attention::kQ, P::kQ, batch);
    const T* const o_cotangent = operand_of<P>(operands, attention::kOCotangent, P::kO, batch);
    begin_copy_of_rows<P, N::kStep, P::kQueries, P::kFeatures>(stage.d, q, P::kQ.i, first);
    begin_copy_of_rows<P, N::kStep, P::kQueries, P::kValueFeatures>(stage.e, o_cotangent, P::kO.i, first);
    begin_copy_of_numbers<P>(numbers(stage), operands, batch, first);
  }
};

// Sums of the sides' cotangents over what passes, for each of a thread's rows.
template <class P, int fragments>
struct RowSums {
  static constexpr int kFirst = P::kWrites, kCount = P::kSideCotangents - kFirst;
  float sums[fragments][2][kCount > 0 ? kCount : 1];

  // Not by member initializers: see RowState.
  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (int row = 0; row < 2 * fragments; ++row) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[row / 2][row % 2][k] = 0.0f;
    }
  }
  __device__ __forceinline__ void add(int m, int half, const SideCotangents<P>& of_score) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[m][half][k] += of_score.values[kFirst + k];
  }
  // Writes them as the results from `result` on: the rows from `row` on, below `rows`, of batch index n.
  __device__ __forceinline__ void write(const typename P::Addresses& operands, int result, int64_t n, int row,
                                        int rows) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float* const to = static_cast<float*>(operands.address[P::kFirstResult + result + k]) + n * rows;
#pragma unroll
      for (int m = 0; m < fragments; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = sum_of_row(sums[m][half][k]);
          const int to_row = row + m * kMma + half * 8;
          if (lane() % 4 == 0 && to_row < rows) to[to_row] = sum;
        }
      }
    }
  }
};

// Differentiates the scores of a tile with keys as rows, of which the thread's first one is `key`: s are the products
// q k^T and become weights, t are do v^T and become cotangents of the products. `queries`: the address of their
// numbers.
template <class P, bool is_whole, int fragments, int step, class Tile>
__device__ __forceinline__ void differentiate_keys(Accumulators<fragments, step>& s, Accumulators<fragments, step>& t,
                                                   RowSums<P, fragments>& sums, const Tile& tile, Address queries,
                                                   int key) {
#pragma unroll
  for (int c = 0; c < step / 8; ++c) {
    float numbers[4], deltas[2];  // of two queries
    read_shared(numbers, numbers_of(queries, c * 8 + own_column()));
    read_shared(deltas, delta_of<P>(queries, c * 8 + own_column()));
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = c * 8 + own_column() + e % 2, j = key + m * kMma + e / 2 * 8;
        const RowNumbers row{numbers[2 * (e % 2)], numbers[2 * (e % 2) + 1], deltas[e % 2]};
        const ScoreSides<P, Tile, is_whole> side{tile, i, j};
        float& x = s.values[m][c][e];
        SideCotangents<P> of_sides = differentiate<P>(x, t.values[m][c][e], softmax_of<P>(x, row, side), row, side);
        if (!is_whole && P::kQueries % step != 0 && tile.i + i >= P::kQueries) {
          s.values[m][c][e] = t.values[m][c][e] = 0.0f;
          of_sides = {};
        }
        sums.add(m, e / 2, of_sides);
      }
    }
  }
}

// dk and dv: a block has Tiling::rows() keys, and the queries of all batch indices that share the keys pass. Products
// have keys as rows, so that p^T and dx^T are operands of the next products without a transposition.
template <class P>
__device__ __forceinline__ void attention_keys(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  using Queries = PassingQueries<P>;
  constexpr int kParts = N::kTiling.parts, kOwnDepth = N::kDepth / kParts, kOwnWidth = N::kWidth / kParts;
  constexpr int kBlocks = ceil_div(P::kKeys, N::kRows);

  const BlockIndex own_index = own_block<P>(kBlocks * kParts, P::kGroups);
  const int block = own_index.row_block % kBlocks, part = own_index.row_block / kBlocks;
  const unsigned n = own_index.n;  // the first that has these keys
  const int first = block * N::kRows, row_of_warp = first_row_of_warp(N::kRowsOfWarp);
  const SharedRowPair<P, N::kRows> own(shared_memory());
  const Queries queries{operands, n, block};
  Places places(own.d.base + own.kBytes, Queries::kBytes);

  begin_copy_of_rows<P, N::kRows, P::kKeys, P::kFeatures>(own.d, operand_of<P>(operands, attention::kK, P::kK, n),
                                                          P::kK.j, first);
  begin_copy_of_rows<P, N::kRows, P::kKeys, P::kValueFeatures>(own.e, operand_of<P>(operands, attention::kV, P::kV, n),
                                                               P::kV.j, first);
  typename Queries::Position at = queries.first_position();
  queries.begin_copies(at, typename Queries::Stage(places.read));
  commit_copies();

  Accumulators<N::kFragments, kOwnDepth> dk;
  Accumulators<N::kFragments, kOwnWidth> dv;
  RowSums<P, N::kFragments> sums;
  wait_for_all_but_last<0>();
  own.round_own_packs();
  while (at.exists()) {
    const typename Queries::Stage stage(places.read);
    wait_for_all_but_last<0>();
    stage.round_own_packs();
    barrier();  // this stage is there, and nobody reads the one before any more
    const typename Queries::Position next = queries.after(at);
    queries.begin_copies(next, typename Queries::Stage(places.copied));
    commit_copies();
    Accumulators<N::kFragments, N::kStep> s, t;
    add_product_of_rows(s, own.d, row_of_warp, stage.d);
    add_product_of_rows(t, own.e, row_of_warp, stage.e);
    const SideOffsets<P> sides(operands, n + at.group);
    const typename Queries::Tile tile = queries.tile(at, stage, sides);
    for_tile<P>(at.range.is_whole(at.step), [&](auto is_whole) {
      differentiate_keys<P, decltype(is_whole)::kValue>(s, t, sums, tile, queries.numbers(stage),
                                                        row_of_warp + own_row());
    });
    add_product(dv, s, stage.e, part * kOwnWidth);
    add_product(dk, t, stage.d, part * kOwnDepth);
    places.exchange();
    at = next;
  }
  wait_for_all_but_last<0>();

  write(operand_of<P>(operands, P::kFirstResult, P::kK, n), P::kK.j, dk, first + row_of_warp, P::kKeys,
        part * kOwnDepth, P::kFeatures, narrowed<T>);
  write(operand_of<P>(operands, P::kFirstResult + 1, P::kV, n), P::kV.j, dv, first + row_of_warp, P::kKeys,
        part * kOwnWidth, P::kValueFeatures, narrowed<T>);
  if (part == 0) sums.write(operands, 2, n / P::kGroups, first + row_of_warp + own_row(), P::kKeys);
}

// An array of queries x keys of a batch index, which blocks write: two neighbours along keys at a time.
template <class P>
struct Written {
  using W = typename P::Written;
  W* to;

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
  // Writes 0 for the steps of so many queries that are beyond their range.
  template <int queries>
  __device__ __forceinline__ void write_zeros(int first_query, const Range& range) const {
    using N = Counts<P>;
    constexpr int kSteps = ceil_div(P::kKeys, N::kStep);
    const bool any = range.first < range.last;
    write_zeros<queries>(first_query, 0, (any ? range.first : kSteps) * N::kStep);
    if (any) write_zeros<queries>(first_query, range.last * N::kStep, kSteps * N::kStep);
  }

 private:
  // Of the keys [begin, end), by the threads of a block or of a warpgroup.
  template <int queries>
  __device__ __forceinline__ void write_zeros(int first_query, int begin, int end) const {
    const int pairs = (end - begin) / 2;
    for (int p = threadIdx.x % Counts<P>::kThreads; p < queries * pairs; p += Counts<P>::kThreads) {
      write(first_query + p / pairs, begin + p % pairs * 2, 0.0f, 0.0f);
    }
  }
};

// Reads the pivots, logarithms of sums and deltas of the thread's rows, from `query` on.
template <class P, int fragments>
__device__ __forceinline__ void read_numbers(RowNumbers (&rows)[fragments][2], const typename P::Addresses& operands,
                                             unsigned n, int query) {
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = begin_of<P>(P::kRowStrides, n) + min(query + m * kMma + half * 8, P::kQueries - 1);
      const float* const numbers = static_cast<const float*>(operands.address[attention::kNumbers]) + 2 * row;
      rows[m][half] = {numbers[0], numbers[1], static_cast<const float*>(operands.address[attention::kDelta])[row]};
    }
  }
}

// The softmax of the scores of products s.
template <class P, int fragments, int step>
__device__ __forceinline__ auto softmax_of_each(const Accumulators<fragments, step>& s,
                                                const RowNumbers (&rows)[fragments][2]) {
  return [&](int m, int c, int e, const auto& side) { return softmax_of<P>(s.values[m][c][e], rows[m][e / 2], side); };
}

// Calls f(m, c, e, side, exists) for element e of each fragment m and column c of a tile with queries as rows, of which
// the thread's first one is `query`.
template <class P, bool is_whole, int fragments, int step, class Tile, class F>
__device__ __forceinline__ void each_score(const Tile& tile, int query, int key, const F& f) {
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int c = 0; c < step / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = query + m * kMma + e / 2 * 8, j = key + c * 8 + own_column() + e % 2;
        const bool exists = is_whole || P::kKeys % Counts<P>::kStep == 0 || tile.j + j < P::kKeys;
        f(m, c, e, ScoreSides<P, Tile, is_whole>{tile, i, j}, exists);
      }
    }
  }
}

// As differentiate_keys, with queries as rows. softmax(m, c, e, side) is that of an element's score, and
// f(m, c, e, of_sides) is given what the element adds to the sides' cotangents.
template <class P, bool is_whole, int fragments, int step, class Tile, class Y, class F>
__device__ __forceinline__ void differentiate_queries(Accumulators<fragments, step>& s,
                                                      Accumulators<fragments, step>& t, const Tile& tile,
                                                      const RowNumbers (&rows)[fragments][2], int query, int key,
                                                      const Y& softmax, const F& f) {
  each_score<P, is_whole, fragments, step>(tile, query, key, [&](int m, int c, int e, const auto& side, bool exists) {
    SideCotangents<P> of_sides =
        differentiate<P>(s.values[m][c][e], t.values[m][c][e], softmax(m, c, e, side), rows[m][e / 2], side);
    if (!exists) {
      t.values[m][c][e] = 0.0f;
      of_sides = {};
    }
    f(m, c, e, of_sides);
  });
}

// The same, where the sides' cotangents are summed over keys or written.
template <class P, bool is_whole, int fragments, int step, class Tile, class Y>
__device__ __forceinline__ void differentiate_rows(Accumulators<fragments, step>& s, Accumulators<fragments, step>& t,
                                                   const Tile& tile, const RowNumbers (&rows)[fragments][2], int query,
                                                   RowSums<P, fragments>& sums, const Written<P>& written,
                                                   const Y& softmax) {
  [[maybe_unused]] float pair[2];
  differentiate_queries<P, is_whole>(s, t, tile, rows, query, 0, softmax,
                                     [&](int m, int c, int e, const SideCotangents<P>& of_sides) {
                                       sums.add(m, e / 2, of_sides);
                                       if constexpr (P::kWrites) {
                                         pair[e % 2] = of_sides.values[0];
                                         const int i = query + m * kMma + e / 2 * 8;
                                         if (e % 2 == 1)
                                           written.write(tile.i + i, tile.j + c * 8 + own_column(), pair[0], pair[1]);
                                       }
                                     });
}

// dq: a block has Tiling::rows() queries, and keys pass.
template <class P>
__device__ __forceinline__ void attention_queries(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  using Keys = PassingKeys<P>;
  constexpr int kBlocks = ceil_div(P::kQueries, N::kRows);

  const BlockIndex own_index = own_block<P>(kBlocks);
  const int block = kBlocks - 1 - own_index.row_block, first = block * N::kRows;
  const unsigned n = own_index.n;
  const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
  const SharedRowPair<P, N::kRows> own(shared_memory());
  Keys keys(operands, n, own.d.base + own.kBytes, first, range.last);

  begin_copy_of_rows<P, N::kRows, P::kQueries, P::kFeatures>(own.d, operand_of<P>(operands, attention::kQ, P::kQ, n),
                                                             P::kQ.i, first);
  begin_copy_of_rows<P, N::kRows, P::kQueries, P::kValueFeatures>(
      own.e, operand_of<P>(operands, attention::kOCotangent, P::kO, n), P::kO.i, first);
  keys.begin_keys(keys.places.read, range.first);
  keys.begin_values(keys.places.read, range.first);
  commit_copies();

  const int row_of_warp = first_row_of_warp(N::kRowsOfWarp), own_row_of_tile = row_of_warp + own_row();
  RowNumbers rows[N::kFragments][2];
  read_numbers<P>(rows, operands, n, first + own_row_of_tile);
  Accumulators<N::kFragments, N::kDepth> dq;
  RowSums<P, N::kFragments> sums;
  const Written<P> written{operand_of<P, typename P::Written>(operands, P::kFirstResult + 1, P::kWrittenStrides, n)};
  wait_for_all_but_last<0>();
  own.round_own_packs();
  for (int step = range.first; step < range.last; ++step) {
    const typename Keys::Stage stage(keys.places.read);
    wait_for_all_but_last<0>();
    stage.round_own_packs();
    barrier();  // this stage is there, and nobody reads the one before any more
    keys.begin_keys(keys.places.copied, step + 1);
    keys.begin_values(keys.places.copied, step + 1);
    commit_copies();
    Accumulators<N::kFragments, N::kStep> s, t;
    add_product_of_rows(s, own.d, row_of_warp, stage.d);
    add_product_of_rows(t, own.e, row_of_warp, stage.e);
    const typename Keys::Tile tile = keys.tile(keys.places.read, step);
    for_tile<P>(range.is_whole(step), [&](auto is_whole) {
      differentiate_rows<P, decltype(is_whole)::kValue>(s, t, tile, rows, own_row_of_tile, sums, written,
                                                        softmax_of_each<P>(s, rows));
    });
    add_product(dq, t, stage.d);
    keys.places.exchange();
  }
  wait_for_all_but_last<0>();
  if constexpr (P::kWrites) written.template write_zeros<N::kRows>(first, range);
  sums.write(operands, 1 + P::kWrites, n, first + own_row_of_tile, P::kQueries);
  write(operand_of<P>(operands, P::kFirstResult, P::kQ, n), P::kQ.i, dq, first + row_of_warp, P::kQueries, 0,
        P::kFeatures, narrowed<T>);
}

// The cotangent of a side that batch indices share, as a bias of queries x keys: a block has a tile of Tiling::rows()
// queries and Tiling::step keys, and the batch indices that share it pass; or a part of these, which XLA adds up.
// Blocks of a multiprocessor wait for their copies by turns.
template <class P>
__device__ __forceinline__ void attention_scores(const typename P::Addresses& operands) {
  using N = Counts<P>;
  using T = typename P::T;
  using Tile = ScoreTile<P, N::kRows, N::kStep>;
  using Queries = SharedRowPair<P, N::kRows>;
  using Keys = SharedRowPair<P, N::kStep>;
  constexpr int kBlocks = ceil_div(P::kQueries, N::kRows), kSteps = ceil_div(P::kKeys, N::kStep);
  constexpr int kPart = N::kStep < 32 ? N::kStep : 32;  // keys whose products are in registers beside the sums

  const BlockIndex own_index = own_block<P>(kBlocks * kSteps * P::kParts, P::kGroups);
  const int step = own_index.row_block % kSteps, block = own_index.row_block / kSteps % kBlocks;
  const unsigned part = own_index.row_block / (kSteps * kBlocks), of_part = ceil_div(P::kGroups, P::kParts);
  const unsigned end = own_index.n + min((part + 1) * of_part, static_cast<unsigned>(P::kGroups));
  const int first = block * N::kRows, row_of_warp = first_row_of_warp(N::kRowsOfWarp);
  // The first batch index from n on that visits the tile.
  const auto visiting = [&](unsigned n) {
    for (; n < end; ++n) {
      const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
      if (range.first <= step && step < range.last) break;
    }
    return n;
  };
  const Queries queries(shared_memory());
  const Keys keys(queries.d.base + Queries::kBytes);
  const auto tile_of = [&](const SideOffsets<P>& sides) {
    return Tile{sides, keys.d.base + Keys::kBytes, first, step * N::kStep};
  };

  Accumulators<N::kFragments, N::kStep> sums;
  tile_of(SideOffsets<P>(operands, own_index.n)).template begin_copies<true>();
  commit_copies();
  for (unsigned n = visiting(own_index.n + part * of_part); n < end; n = visiting(n + 1)) {
    const SideOffsets<P> sides(operands, n);
    const Tile tile = tile_of(sides);
    begin_copy_of_rows<P, N::kRows, P::kQueries, P::kFeatures>(
        queries.d, operand_of<P>(operands, attention::kQ, P::kQ, n), P::kQ.i, first);
    begin_copy_of_rows<P, N::kStep, P::kKeys, P::kFeatures>(keys.d, operand_of<P>(operands, attention::kK, P::kK, n),
                                                            P::kK.j, step * N::kStep);
    begin_copy_of_rows<P, N::kRows, P::kQueries, P::kValueFeatures>(
        queries.e, operand_of<P>(operands, attention::kOCotangent, P::kO, n), P::kO.i, first);
    begin_copy_of_rows<P, N::kStep, P::kKeys, P::kValueFeatures>(
        keys.e, operand_of<P>(operands, attention::kV, P::kV, n), P::kV.j, step * N::kStep);
    tile.begin_copies();
    commit_copies();
    RowNumbers rows[N::kFragments][2];
    read_numbers<P>(rows, operands, n, first + row_of_warp + own_row());
    wait_for_all_but_last<0>();
    queries.round_own_packs();
    keys.round_own_packs();
    barrier();  // all is there
    const bool is_whole = visited<P>(operands, n, block, P::kQueries, P::kKeys).is_whole(step);
#pragma unroll
    for (int key = 0; key < N::kStep; key += kPart) {
      Accumulators<N::kFragments, kPart> s, t;
      add_product_of_rows(s, queries.d, row_of_warp, keys.d, key);
      add_product_of_rows(t, queries.e, row_of_warp, keys.e, key);
      for_tile<P>(is_whole, [&](auto is_whole) {
        differentiate_queries<P, decltype(is_whole)::kValue>(
            s, t, tile, rows, row_of_warp + own_row(), key, softmax_of_each<P>(s, rows),
            [&](int m, int c, int e, const SideCotangents<P>& of_sides) {
              sums.values[m][key / 8 + c][e] += of_sides.values[0];
            });
      });
    }
    barrier();  // nobody reads it any more
  }
  wait_for_all_but_last<0>();

  const Written<P> written{
      operand_of<P, typename P::Written>(operands, P::kFirstResult, P::kWrittenStrides, own_index.n) +
      part * P::kWrittenElements};
#pragma unroll
  for (int m = 0; m < N::kFragments; ++m) {
#pragma unroll
    for (int c = 0; c < N::kStep / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float* x = sums.values[m][c] + e;
        written.write(first + row_of_warp + own_row() + m * kMma + e / 2 * 8, step * N::kStep + c * 8 + own_column(),
                      x[0], x[1]);
      }
    }
  }
}

}  // namespace jax_softmax::device
