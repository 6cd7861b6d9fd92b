// Scores and cotangents, which are made of products, and what they are made of beside these.
#pragma once

#include "attention/tiles.cuh"

namespace jax_softmax::device {

// ---- Scores

// The offsets of batch index n in the side operands.
template <class P>
struct SideOffsets {
  const typename P::Addresses& operands;
  int64_t begin[P::kSides > 0 ? P::kSides : 1];

  __device__ __forceinline__ SideOffsets(const typename P::Addresses& operands, unsigned n) : operands(operands) {
#pragma unroll
    for (int s = 0; s < P::kSides; ++s) begin[s] = begin_of<P>(P::kSideStrides[s], n);
  }
};

// A tile of scores: its first query i and key j, and the address of the side operands that pass with it.
template <class P, int queries, int keys>
struct ScoreTile {
  const SideOffsets<P>& sides;
  Address staged;
  int i, j;

  static constexpr int offset_of(int side) {
    int offset = 0;
    for (int k = 0; k < side; ++k) {
      if (P::kStagedBytes[k] > 0) offset += queries * attention::pitch_of_side(keys, P::kStagedBytes[k]);
    }
    return offset;
  }
  static constexpr int kStagedBytes = offset_of(P::kSides);
  static constexpr bool kKeysPass = keys == Counts<P>::kStep;  // a thread then has neighbours along keys

  template <int k>
  __device__ __forceinline__ Address address_of(int row, int column) const {
    constexpr int kElement = P::kStagedBytes[k], kOffset = offset_of(k);
    return staged + kOffset + row * attention::pitch_of_side(keys, kElement) + column * kElement;
  }
  // Begins to copy the side operands that pass, or that stay, from the k-th on.
  template <bool stays = false, int k = 0>
  __device__ __forceinline__ void begin_copies() const {
    if constexpr (k < P::kSides) {
      constexpr int kElement = P::kStagedBytes[k];
      if constexpr (kElement > 0 && P::kSideStays[k] == stays) {
        constexpr int kPerPack = 16 / kElement, kPacks = keys / kPerPack;
        constexpr Strides kStrides = P::kSideStrides[k];
        const char* const from = static_cast<const char*>(sides.operands.address[P::kSideAddresses[k]]);
        for_own_packs<Counts<P>::kThreads, queries, kPacks>([&](int row, int pack) {
          const int column = pack * kPerPack;
          const bool exists =
              (P::kQueries % queries == 0 || i + row < P::kQueries) && (P::kKeys % keys == 0 || j + column < P::kKeys);
          const int64_t element = sides.begin[k] + (i + row) * kStrides.i + j + column;
          begin_copy<16>(address_of<k>(row, column), exists ? from + element * kElement : from, exists);
        });
      }
      begin_copies<stays, k + 1>();
    }
  }
};

// The keys and values that pass a block of queries, step by step, with the side operands of their scores. What passes
// in a step is in shared memory, in one of two places from `begin` on.
template <class P>
struct PassingKeys {
  using N = Counts<P>;
  using T = typename P::T;
  using Tile = ScoreTile<P, N::kRows, N::kStep>;
  using Stage = SharedRowPair<P, N::kStep>;
  Places places;
  const T *k, *v;
  int first_query, end_step;
  SideOffsets<P> sides;

  __device__ __forceinline__ PassingKeys(const typename P::Addresses& operands, unsigned n, Address begin,
                                         int first_query, int end_step)
      : places(begin, Stage::kBytes + Tile::kStagedBytes),
        k(operand_of<P>(operands, attention::kK, P::kK, n)),
        v(operand_of<P>(operands, attention::kV, P::kV, n)),
        first_query(first_query),
        end_step(end_step),
        sides(operands, n) {}

  __device__ __forceinline__ Tile tile(Address place, int step) const {
    return Tile{sides, place + Stage::kBytes, first_query, step * N::kStep};
  }
  __device__ __forceinline__ void begin_keys(Address to, int step) const {
    if (step >= end_step) return;
    tile(to, step).begin_copies();
    begin_copy_of_rows<P, N::kStep, P::kKeys, P::kFeatures>(Stage(to).d, k, P::kK.j, step * N::kStep);
  }
  __device__ __forceinline__ void begin_values(Address to, int step) const {
    if (step >= end_step) return;
    begin_copy_of_rows<P, N::kStep, P::kKeys, P::kValueFeatures>(Stage(to).e, v, P::kV.j, step * N::kStep);
  }
};

// The values of side operands at a score of a tile. A score beyond the last row reads those of the last one.
template <class P, class Tile, bool is_whole>
struct ScoreSides {
  const Tile& tile;
  int row, column;

  template <int k>
  __device__ __forceinline__ int64_t element() const {
    constexpr Strides kStrides = P::kSideStrides[k];
    int i = tile.i + row, j = tile.j + column;
    if constexpr (!is_whole) {
      i = min(i, P::kQueries - 1);
      j = min(j, P::kKeys - 1);
    }
    return tile.sides.begin[k] + i * kStrides.i + j * kStrides.j;
  }
  template <int k>
  __device__ __forceinline__ int index() const {
    return static_cast<int>(element<k>());
  }
  template <int k, class T>
  __device__ __forceinline__ auto array() const {
    if constexpr (P::kStagedBytes[k] > 0) {
      if constexpr (Tile::kKeysPass)
        return read_one_of_two<T>(tile.template address_of<k>(row, column & ~1), column & 1);
      return read_shared_as<T>(tile.template address_of<k>(row, column));
    } else {
      return read_global(static_cast<const T*>(tile.sides.operands.address[P::kSideAddresses[k]]) + element<k>());
    }
  }
  // A mask, which is `value` in all whole tiles.
  template <bool value>
  __device__ __forceinline__ bool known(bool mask) const {
    return is_whole ? value : mask;
  }
};

// ---- Softmax

inline constexpr float kLog2E = 1.44269502f;

// Terms exp(x - pivot) as exp2(x log2(e) - r), where r is pivot log2(e), rounded. That rounding, by at most 4, is a
// factor that all terms share. Beyond kLarge r is the pivot, and x stands for x log2(e): scores that differ there
// differ by at least 8, so that smaller terms hardly count. A pivot of -inf, of a row without a finite score so far,
// counts as 0.
struct Pivot {
  static constexpr float kLarge = 1 << 26;
  float value, factor, subtrahend;

  __device__ __forceinline__ explicit Pivot(float largest) {
    value = largest == -kInfinity ? 0.0f : largest;
    factor = fabsf(value) < kLarge ? kLog2E : 1.0f;
    subtrahend = value * factor;
  }
  __device__ __forceinline__ float term(float x) const { return exp2_of(fmaf(x, factor, -subtrahend)); }
  // The factor that makes sums of terms relative to this pivot relative to a larger one.
  __device__ __forceinline__ float rescale(const Pivot& to) const {
    const bool both_small = factor == kLog2E && to.factor == kLog2E;
    return exp2_of(both_small ? subtrahend - to.subtrahend : (value - to.value) * kLog2E);
  }
  // log2 of the sum of exp(x - pivot), given the sum of terms.
  __device__ __forceinline__ float log2_of_sum(float sum) const {
    return log2_of(sum) - fmaf(value, factor, -subtrahend);
  }
};

// What the backward kernels read of a row.
struct RowNumbers {
  float pivot, log2_sum, delta;

  __device__ __forceinline__ float weight(float score) const { return exp2_of(fmaf(score - pivot, kLog2E, -log2_sum)); }
};

// The numbers of a step's queries in shared memory: pivots and logarithms of sums, and then deltas.
__device__ __forceinline__ Address numbers_of(Address queries, int row) { return queries + 8 * row; }
template <class P>
__device__ __forceinline__ Address delta_of(Address queries, int row) {
  return numbers_of(queries, Counts<P>::kStep) + 4 * row;
}
// Of the queries of batch index n from `first` on: each thread copies those of one.
template <class P>
__device__ __forceinline__ void begin_copy_of_numbers(Address to, const typename P::Addresses& operands, unsigned n,
                                                      int first) {
  const int row = threadIdx.x % Counts<P>::kThreads;
  if (row >= Counts<P>::kStep) return;
  const bool exists = first + row < P::kQueries;
  const int64_t from = static_cast<int64_t>(n) * P::kQueries + (exists ? first + row : 0);
  begin_copy<8>(numbers_of(to, row), static_cast<const float*>(operands.address[attention::kNumbers]) + 2 * from,
                exists);
  begin_copy<4>(delta_of<P>(to, row), static_cast<const float*>(operands.address[attention::kDelta]) + from, exists);
}

// What a score adds to the sides' cotangents.
template <class P>
struct SideCotangents {
  float values[P::kSideCotangents > 0 ? P::kSideCotangents : 1];
};

// The softmax of the score of a product q k^T.
template <class P, class Side>
__device__ __forceinline__ float softmax_of(float product, const RowNumbers& row, const Side& side) {
  const float score = P::score(product, side);
  // Such scores have weight 0, whatever the row's others are.
  return P::kEmptyRowsAreZero && score == -kInfinity ? 0.0f : row.weight(score);
}

// `product` is q k^T, with the softmax y, and becomes the weight of the value; `cotangent` is do v^T and becomes the
// cotangent of q k^T.
template <class P, class Side>
__device__ __forceinline__ SideCotangents<P> differentiate(float& product, float& cotangent, float y,
                                                           const RowNumbers& row, const Side& side) {
  const float x0 = product, t = cotangent;
  product = P::weight(y, side);
  const float g = y * (P::weight_transposed(t, side) - row.delta);
  cotangent = P::score_transposed(g, x0, side);
  SideCotangents<P> of_sides;
  P::side_cotangents(of_sides.values, g, x0, y, t, side);
  return of_sides;
}

}  // namespace jax_softmax::device
