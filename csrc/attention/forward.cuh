// o = weight(softmax(score(q k^T))) v, where `weight` is linear; each row's pivot and the logarithm of its sum; and,
// for a backward pass, what o lost by rounding.
//
// A block has Tiling::rows() queries. For each Tiling::step keys of its range:
//
//   s = score(q k^T)                    rows x step, in registers
//   m' = m, or max(m, rowmax(s))        the running maximum: see kSlack
//   p = exp(s - m')
//   l = l exp(m - m') + rowsum(p)
//   o = o exp(m - m') + weight(p) v     rows x value features, in registers
//
// and in the end o / l, times what `weight` left out. Keys are copied while the previous step's weights are multiplied
// with values, and values while scores are computed.
#pragma once

#include "attention/scores.cuh"

namespace jax_softmax::device {

// A row's state. Each of its four lanes has the sum of its own columns.
struct RowState {
  float pivot, sum;

  // Not by member initializers: of two-dimensional arrays NVRTC 13 runs them for the first row alone.
  __device__ __forceinline__ RowState() : pivot(-kInfinity), sum(0.0f) {}
  static __device__ __forceinline__ float largest_of_row(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
  }
};

// The pivots of a warp's rows change only if a score is larger by more than this: terms are at most exp(kSlack).
inline constexpr float kSlack = 4.0f;

// Multiplies a thread's row.
template <int fragments, int columns>
__device__ __forceinline__ void rescale_row(Accumulators<fragments, columns>& c, int m, int half, float factor) {
#pragma unroll
  for (int n = 0; n < columns / 8; ++n) {
    c.values[m][n][2 * half] *= factor;
    c.values[m][n][2 * half + 1] *= factor;
  }
}

// Replaces scores by terms, and adds them to the rows' sums. Where pivots grow, sums are rescaled, and
// rescale_others(m, half, factor) does so with all else of a row.
template <int fragments, int step, class F>
__device__ __forceinline__ void accumulate(Accumulators<fragments, step>& s, RowState (&rows)[fragments][2],
                                           const F& rescale_others) {
  float largest[fragments][2];
  bool grows = false;
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = -kInfinity;
#pragma unroll
      for (int n = 0; n < step / 8; ++n) x = fmaxf(x, fmaxf(s.values[m][n][2 * half], s.values[m][n][2 * half + 1]));
      largest[m][half] = RowState::largest_of_row(x);
      grows |= largest[m][half] > rows[m][half].pivot + kSlack;
    }
  }
  if (any_of_warp(grows)) {
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowState& row = rows[m][half];
        const float pivot = fmaxf(row.pivot, largest[m][half]);
        const float rescale = row.pivot == -kInfinity ? 0.0f : Pivot(row.pivot).rescale(Pivot(pivot));
        row.pivot = pivot;
        row.sum *= rescale;
        rescale_others(m, half, rescale);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pivot pivot(rows[m][half].pivot);
#pragma unroll
      for (int n = 0; n < step / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s.values[m][n][e] = pivot.term(s.values[m][n][e]);
          rows[m][half].sum += s.values[m][n][e];
        }
      }
    }
  }
}

// Makes scores of a tile's products. `row`: the thread's first one in the tile.
template <class P, bool is_whole, class Tile, int fragments, int step>
__device__ __forceinline__ void score(Accumulators<fragments, step>& s, const Tile& tile, int row) {
  s.each([&](float& x, int r, int column) {
    column += own_column();
    x = P::score(x, ScoreSides<P, Tile, is_whole>{tile, row + r, column});
    if (!is_whole && P::kKeys % step != 0 && tile.j + column >= P::kKeys) x = -kInfinity;
  });
}

// Writes the pivots and the logarithms of the sums of the thread's rows, from `query` on, and gives the factors by
// which o is multiplied.
template <class P, int fragments>
__device__ __forceinline__ void finish_rows(float* numbers, int query, const RowState (&rows)[fragments][2],
                                            float (&factors)[fragments][2]) {
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowState& row = rows[m][half];
      const float sum = sum_of_row(row.sum);
      const bool zero = P::kEmptyRowsAreZero && row.pivot == -kInfinity && sum == 0.0f;
      factors[m][half] = zero ? 0.0f : P::kWeightFactor * (1.0f / sum);
      const int i = query + m * kMma + half * 8;
      if (lane() % 4 == 0 && i < P::kQueries) {
        // With a sum of +inf every weight is 0; with a pivot of -inf it is NaN.
        numbers[2 * i] = zero ? 0.0f : row.pivot;
        numbers[2 * i + 1] = zero ? kInfinity : Pivot(row.pivot).log2_of_sum(sum);
      }
    }
  }
}

// Multiplies o by the factors that the rows' sums give, and writes it from `row` on, with the rows' numbers and what it
// lost by rounding.
template <class P, int fragments, int features>
__device__ __forceinline__ void finish(const typename P::Addresses& operands, unsigned n, int row,
                                       Accumulators<fragments, features>& o, const RowState (&rows)[fragments][2],
                                       float (&factors)[fragments][2]) {
  using T = typename P::T;
  float* const numbers = static_cast<float*>(operands.address[P::kFirstResult + 1]) + 2ll * n * P::kQueries;
  finish_rows<P>(numbers, row + own_row(), rows, factors);
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rescale_row(o, m, half, factors[m][half]);
  }
  write(operand_of<P>(operands, P::kFirstResult, P::kO, n), P::kO.i, o, row, P::kQueries, 0, P::kValueFeatures,
        narrowed<T>);
  if constexpr (P::kLostShift > 0) {
    write(operand_of<P, int8_t>(operands, P::kFirstResult + 2, P::kO, n), P::kO.i, o, row, P::kQueries, 0,
          P::kValueFeatures, [](float x, float y) {
            float low, high;
            Pair<T>::widen(low, high, narrowed<T>(x, y));
            const auto lost = [](float x, float rounded) {
              const int bits = static_cast<int>(__float_as_uint(x)) - static_cast<int>(__float_as_uint(rounded));
              return (bits + (1 << P::kLostShift >> 1)) >> P::kLostShift;
            };
            return saturated_to_int8(lost(x, low), lost(y, high));
          });
  }
}

template <class P>
__device__ __forceinline__ void attention_forward(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  using Keys = PassingKeys<P>;
  constexpr int kBlocks = ceil_div(P::kQueries, N::kRows);

  // The last queries first: with a causal mask they take longest.
  const BlockIndex own = own_block<P>(kBlocks);
  const int block = kBlocks - 1 - own.row_block, first = block * N::kRows;
  const unsigned n = own.n;
  const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
  const SharedRows<T, N::kDepth> q{shared_memory()};
  Keys keys(operands, n, q.base + N::kRows * q.kBytes, first, range.last);

  begin_copy_of_rows<P, N::kRows, P::kQueries, P::kFeatures>(q, operand_of<P>(operands, attention::kQ, P::kQ, n),
                                                             P::kQ.i, first);
  keys.begin_keys(keys.places.read, range.first);
  commit_copies();
  keys.begin_values(keys.places.read, range.first);
  commit_copies();

  const int row_of_warp = first_row_of_warp(N::kRowsOfWarp), own_row_of_tile = row_of_warp + own_row();
  Accumulators<N::kFragments, N::kWidth> o;
  RowState rows[N::kFragments][2];
  wait_for_all_but_last<1>();
  round_own_packs<P, N::kRows>(q);
  for (int step = range.first; step < range.last; ++step) {
    const typename Keys::Stage stage(keys.places.read);
    wait_for_all_but_last<1>();
    round_own_packs<P, N::kStep>(stage.d);
    barrier();  // the keys are there, and nobody reads those of the step before any more
    keys.begin_keys(keys.places.copied, step + 1);
    commit_copies();
    Accumulators<N::kFragments, N::kStep> s;
    add_product_of_rows(s, q, row_of_warp, stage.d);
    const typename Keys::Tile tile = keys.tile(keys.places.read, step);
    for_tile<P>(range.is_whole(step),
                [&](auto is_whole) { score<P, decltype(is_whole)::kValue>(s, tile, own_row_of_tile); });
    accumulate(s, rows, [&](int m, int half, float factor) { rescale_row(o, m, half, factor); });
    wait_for_all_but_last<1>();
    round_own_packs<P, N::kStep>(stage.e);
    barrier();  // the values are there, and nobody reads those of the step before any more
    keys.begin_values(keys.places.copied, step + 1);
    commit_copies();
    for_tile<P>(range.is_whole(step), [&](auto is_whole) {
      using Own = ScoreSides<P, typename Keys::Tile, decltype(is_whole)::kValue>;
      s.each([&](float& y, int row, int column) {
        y = P::weight(y, Own{tile, own_row_of_tile + row, own_column() + column});
      });
    });
    add_product(o, s, stage.e);
    keys.places.exchange();
  }
  wait_for_all_but_last<0>();

  float factors[N::kFragments][2];
  finish<P>(operands, n, first + row_of_warp, o, rows, factors);
}

}  // namespace jax_softmax::device
