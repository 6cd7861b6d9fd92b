// Rows in shared memory, their products on tensor cores, and scores and cotangents, which are made of the products.
//
// The problem that a kernel is compiled for (see fusion/attention/source.py) is a struct P with these constants:
//
//   T                                  the type of q, k, v and of the results
//   kTiling, kQueries, kKeys, kFeatures, kValueFeatures
//   kBatchDims, kExtents               of q, those of the keys first; kGroups, the product of those that keys lack
//   kQ, kK, kV, kO, kBounds            Strides; kBounded, whether there are bounds
//   kSides, kSideStrides, kSideAddresses   of what scores read beside; addresses of the arrays
//   kStagedBytes                       of each side the bytes of an element, if it passes through shared memory, or 0
//   kEmptyRowsAreZero                  the weights of a row whose scores are all -inf: 0, or NaN
//   score(x0, side), weight(y, side)   of the product x0 = q k^T, and of the softmax y of the scores
//   score_transposed(g, x0, side), weight_transposed(t, side)   their linear maps, transposed, in the backward kernels
//                                      which ask side.known for the value of a mask
//   kWrites                            whether dq's kernel writes what `written(g, x0, side)` makes of the scores'
//                                      cotangents, of type Written, to an array with kWrittenStrides
#pragma once

#include "attention/warp.cuh"

namespace jax_softmax::device {

using attention::kMma;
using attention::kNumbersPerPack;
using attention::kStages;
using attention::Strides;

// ---- Tiles

// Rows of numbers of 16 bits in shared memory.
template <int columns>
struct SharedRows {
  static constexpr int kPacks = columns / kNumbersPerPack, kPitch = attention::pitch(columns), kBytes = 16 * kPitch;
  Address base;

  __device__ __forceinline__ Address pack(int row, int pack) const {
    if constexpr (kPacks % 8 == 0) pack ^= row % 8;
    return base + (row * kPitch + pack) * 16;
  }
};

// Constants that follow from a problem.
template <class P>
struct Counts {
  static constexpr attention::Tiling kTiling = P::kTiling;
  static constexpr int kRows = kTiling.rows(), kStep = kTiling.step, kThreads = kTiling.threads();
  static constexpr int kFragments = kTiling.fragments, kRowsOfWarp = kFragments * kMma;
  static constexpr int kDepth = attention::padded(P::kFeatures, kTiling);
  static constexpr int kWidth = attention::padded(P::kValueFeatures, kTiling);
};

// Rows of keys and of values, or of queries and of the output's cotangent.
template <class P, int count>
struct SharedRowPair {
  using N = Counts<P>;
  static constexpr int kBytes = count * (SharedRows<N::kDepth>::kBytes + SharedRows<N::kWidth>::kBytes);
  SharedRows<N::kDepth> d;
  SharedRows<N::kWidth> e;
  __device__ __forceinline__ explicit SharedRowPair(Address base)
      : d{base}, e{base + count * SharedRows<N::kDepth>::kBytes} {}
};

// Calls f(row, pack) for the thread's share of rows x packs. Neighbouring threads have neighbouring packs; if a row's
// packs divide the threads, the row of a turn is a constant more than that of the turn before.
template <int threads, int rows, int packs, class F>
__device__ __forceinline__ void for_own_packs(const F& f) {
  constexpr int kTurns = ceil_div(rows * packs, threads);
  const int first = threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int p = first + turn * threads;
    if (rows * packs % threads != 0 && p >= rows * packs) return;
    if constexpr (threads % packs == 0) {
      f(first / packs + turn * (threads / packs), first % packs);
    } else {
      f(p / packs, p % packs);
    }
  }
}

// Begins to copy `count` rows, from `first` on, of an operand of rows x features. What does not exist is 0.
template <class P, int count, int rows, int features, int columns>
__device__ __forceinline__ void begin_copy_of_rows(SharedRows<columns> to, const typename P::T* operand, int64_t stride,
                                                   int first) {
  constexpr int kPerPack = attention::kNumbersPerPack;
  for_own_packs<Counts<P>::kThreads, count, SharedRows<columns>::kPacks>([&](int row, int pack) {
    const bool row_exists = rows % count == 0 || first + row < rows;
    const bool exists = row_exists && (features == columns || pack * kPerPack < features);
    begin_copy<16>(to.pack(row, pack), exists ? operand + (first + row) * stride + pack * kPerPack : operand, exists);
  });
}

// ---- Products

// A warp's part of a product. Of each fragment of rows and each 8 columns, lane l has two neighbours, from row l / 4
// and column 2 (l % 4) on, and the two of 8 rows further down.
template <int fragments, int columns>
struct Accumulators {
  float values[fragments][columns / 8][4];

  __device__ __forceinline__ Accumulators() {
    each([](float& x, int, int) { x = 0.0f; });
  }
  // f(element, row, column), where row and column are those of lane 0.
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
#pragma unroll
      for (int n = 0; n < columns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(values[m][n][e], m * kMma + e / 2 * 8, n * 8 + e % 2);
      }
    }
  }
};
__device__ __forceinline__ int own_row() { return lane() / 4; }
__device__ __forceinline__ int own_column() { return lane() % 4 * 2; }

// c (rows x columns) += a (rows x depth) b^T (depth x columns): a are the rows from `row` on, b has `columns` rows.
template <class T, int fragments, int columns, int depth>
__device__ __forceinline__ void add_product_of_rows(Accumulators<fragments, columns>& c, SharedRows<depth> a, int row,
                                                    SharedRows<depth> b) {
  const int l = lane();
#pragma unroll
  for (int k = 0; k < depth / kMma; ++k) {
    uint32_t own[fragments][4];
#pragma unroll
    for (int m = 0; m < fragments; ++m) load_matrices(own[m], a.pack(row + m * kMma + l % 16, 2 * k + l / 16));
#pragma unroll
    for (int n = 0; n < columns / kMma; ++n) {
      uint32_t others[4];
      load_matrices(others, b.pack(n * kMma + l % 8 + l / 16 * 8, 2 * k + l / 8 % 2));
#pragma unroll
      for (int m = 0; m < fragments; ++m) {
        multiply_add<T>(c.values[m][2 * n], own[m], others[0], others[1]);
        multiply_add<T>(c.values[m][2 * n + 1], own[m], others[2], others[3]);
      }
    }
  }
}

// c (rows x columns) += p (rows x depth, rounded) b (depth x columns): b has `depth` rows, of which the columns from
// `first` on count.
template <class T, int fragments, int columns, int depth, int width>
__device__ __forceinline__ void add_product(Accumulators<fragments, columns>& c,
                                            const Accumulators<fragments, depth>& p, SharedRows<width> b,
                                            int first = 0) {
  const int l = lane();
#pragma unroll
  for (int k = 0; k < depth / kMma; ++k) {
    uint32_t own[fragments][4];
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&x)[4] = p.values[m][2 * k + half];
        own[m][2 * half] = narrowed<T>(x[0], x[1]);
        own[m][2 * half + 1] = narrowed<T>(x[2], x[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < columns / kMma; ++n) {
      uint32_t others[4];
      load_transposed(others, b.pack(k * kMma + l % 16, first / kNumbersPerPack + 2 * n + l / 16));
#pragma unroll
      for (int m = 0; m < fragments; ++m) {
        multiply_add<T>(c.values[m][2 * n], own[m], others[0], others[1]);
        multiply_add<T>(c.values[m][2 * n + 1], own[m], others[2], others[3]);
      }
    }
  }
}

// Writes c, times a factor of each row, to rows from `row` on and columns from `first` on, below `existing` and
// `features`.
template <class T, int fragments, int columns, class Factor>
__device__ __forceinline__ void write(T* to, int64_t stride, const Accumulators<fragments, columns>& c, int row,
                                      int existing, int first, int features, const Factor& factor) {
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to_row = row + m * kMma + half * 8 + own_row();
      if (to_row >= existing) continue;
      const float f = factor(m, half);
#pragma unroll
      for (int n = 0; n < columns / 8; ++n) {
        const int column = first + n * 8 + own_column();
        if (column >= features) continue;
        const float* x = c.values[m][n] + 2 * half;
        *reinterpret_cast<uint32_t*>(to + to_row * stride + column) = narrowed<T>(x[0] * f, x[1] * f);
      }
    }
  }
}

// ---- Where a block is

// The offset of batch index n in an operand.
template <class P>
__device__ __forceinline__ int64_t begin_of(const Strides& strides, unsigned n) {
  int64_t offset = 0;
#pragma unroll
  for (int d = P::kBatchDims - 1; d >= 0; --d) {
    const unsigned extent = P::kExtents[d];
    offset += static_cast<int64_t>(d == 0 ? n : n % extent) * strides.batch[d];
    n /= extent;
  }
  return offset;
}

// A block's rows, those from row_block * kRows on, and its batch index.
struct BlockIndex {
  int row_block;
  unsigned n;
};
// `blocks`: of a batch index; `alike`: how many consecutive batch indices share a block's rows.
//
// Blocks run in waves of some batch indices. In a wave row block 0 of all its batch indices comes first, which kernels
// make the longest: so few multiprocessors wait at the end, and the rows that pass are in the L2 cache. Neighbouring
// blocks differ in the outermost batch dimension, along which a side operand may be broadcast.
template <class P>
__device__ __forceinline__ BlockIndex own_block(unsigned blocks, unsigned alike = 1) {
  const unsigned count = gridDim.x / blocks, most = ceil_div(attention::kBlocksOfWave, blocks);
  const unsigned wave = blockIdx.x / (most * blocks), in_wave = blockIdx.x % (most * blocks);
  const unsigned own = min(most, count - wave * most);
  unsigned others = 1;
#pragma unroll
  for (int d = 1; d < P::kBatchDims; ++d) others *= P::kExtents[d];
  const unsigned n = wave * most + in_wave % own, outermost = count * alike / others;
  return {static_cast<int>(in_wave / own), n % outermost * others + n / outermost * alike};
}

// An operand from batch index n on.
template <class P, class T = typename P::T>
__device__ __forceinline__ T* operand_of(const typename P::Addresses& operands, int index, const Strides& strides,
                                         unsigned n) {
  return static_cast<T*>(operands.address[index]) + begin_of<P>(strides, n);
}
__device__ __forceinline__ int first_row_of_warp(int rows) { return static_cast<int>(threadIdx.x / 32) * rows; }

// The steps that a block visits, [first, last), and those of them whose tiles are whole: no score is masked or beyond
// the last row.
struct Range {
  int first, last, first_whole, last_whole;

  __device__ __forceinline__ bool is_whole(int step) const { return first_whole <= step && step < last_whole; }
};
// `stay` and `pass`: how many rows of an operand stay and pass.
template <class P>
__device__ __forceinline__ Range visited(const typename P::Addresses& operands, unsigned n, int block, int stay,
                                         int pass) {
  constexpr int kRows = Counts<P>::kRows, kStep = Counts<P>::kStep;
  const int steps = static_cast<int>(ceil_div(pass, kStep));
  if constexpr (!P::kBounded) return {0, steps, 0, (block + 1) * kRows <= stay ? pass / kStep : 0};
  const int* const ends =
      static_cast<const int*>(operands.address[P::kBoundsAddress]) + begin_of<P>(P::kBounds, n) + 4 * block;
  return {max(ends[0], 0), min(ends[1], steps), ends[2], ends[3]};
}

// Calls f with whether a tile is whole, as a constant. f is compiled for both, unless all tiles are whole.
template <bool value>
struct Constant {
  static constexpr bool kValue = value;
};
template <class P, class F>
__device__ __forceinline__ void for_tile(bool is_whole, const F& f) {
  constexpr int kRows = Counts<P>::kRows;
  if (is_whole || (!P::kBounded && P::kQueries % kRows == 0 && P::kKeys % kRows == 0)) {
    f(Constant<true>{});
  } else {
    f(Constant<false>{});
  }
}

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
  // Begins to copy the side operands that pass, from the k-th on.
  template <int k = 0>
  __device__ __forceinline__ void begin_copies() const {
    if constexpr (k < P::kSides) {
      constexpr int kElement = P::kStagedBytes[k];
      if constexpr (kElement > 0) {
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
      begin_copies<k + 1>();
    }
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

// `product` is q k^T and becomes the weight of the value; `cotangent` is do v^T and becomes the cotangent of q k^T.
// Returns the cotangent of the score.
template <class P, class Side>
__device__ __forceinline__ float differentiate(float& product, float& cotangent, const RowNumbers& row,
                                               const Side& side) {
  const float x0 = product, score = P::score(x0, side);
  // Such scores have weight 0, whatever the row's others are.
  const float y = P::kEmptyRowsAreZero && score == -kInfinity ? 0.0f : row.weight(score);
  product = P::weight(y, side);
  const float g = y * (P::weight_transposed(cotangent, side) - row.delta);
  cotangent = P::score_transposed(g, x0, side);
  return g;
}

}  // namespace jax_softmax::device
