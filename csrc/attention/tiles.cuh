// Rows in shared memory, their products on tensor cores, and scores and cotangents, which are made of the products.
#pragma once

#include "attention/blocks.cuh"

namespace jax_softmax::device {

using attention::kBytesOfPack;
using attention::kStages;

// ---- Tiles

// Rows of numbers in shared memory.
template <class T, int columns>
struct SharedRows {
  static constexpr int kPerPack = kBytesOfPack / static_cast<int>(sizeof(T)), kPacks = columns / kPerPack;
  static constexpr int kPitch = attention::pitch(columns, sizeof(T)), kBytes = kBytesOfPack * kPitch;
  Address base;

  __device__ __forceinline__ Address pack(int row, int pack) const {
    if constexpr (kPacks % 8 == 0) pack ^= row % 8;
    return base + (row * kPitch + pack) * kBytesOfPack;
  }
  __device__ __forceinline__ Address number(int row, int column) const {
    return pack(row, column / kPerPack) + column % kPerPack * static_cast<int>(sizeof(T));
  }
};

// Calls f(row, pack) for the thread's share of rows x packs. Neighbouring threads have neighbouring packs; if a row's
// packs divide the threads, the row of a turn is a constant more than that of the turn before.
template <int threads, int rows, int packs, class F>
__device__ __forceinline__ void for_own_packs(const F& f) {
  constexpr int kTurns = ceil_div(rows * packs, threads);
  const int first = threadIdx.x % threads;
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
__device__ __forceinline__ void begin_copy_of_rows(SharedRows<typename P::T, columns> to, const typename P::T* operand,
                                                   int64_t stride, int first) {
  using Rows = SharedRows<typename P::T, columns>;
  constexpr int kPerPack = Rows::kPerPack;
  for_own_packs<Counts<P>::kThreads, count, Rows::kPacks>([&](int row, int pack) {
    const bool row_exists = rows % count == 0 || first + row < rows;
    const bool exists = row_exists && (features == columns || pack * kPerPack < features);
    begin_copy<16>(to.pack(row, pack), exists ? operand + (first + row) * stride + pack * kPerPack : operand, exists);
  });
}

// Rounds the packs that the thread copied, as products read float32 as TF32. Others read them behind a barrier.
template <class P, int count, class T, int columns>
__device__ __forceinline__ void round_own_packs(SharedRows<T, columns> rows) {
  if constexpr (sizeof(T) == 4) {
    for_own_packs<Counts<P>::kThreads, count, rows.kPacks>([&](int row, int pack) {
      float x[4];
      read_shared(x, rows.pack(row, pack));
#pragma unroll
      for (float& number : x) number = __uint_as_float(rounded_to_tf32(number));
      write_shared(rows.pack(row, pack), x);
    });
  }
}

// Rows of keys and of values, or of queries and of the output's cotangent.
template <class P, int count>
struct SharedRowPair {
  using OfD = SharedRows<typename P::T, Counts<P>::kDepth>;
  using OfE = SharedRows<typename P::T, Counts<P>::kWidth>;
  static constexpr int kBytes = count * (OfD::kBytes + OfE::kBytes);
  OfD d;
  OfE e;
  __device__ __forceinline__ explicit SharedRowPair(Address base) : d{base}, e{base + count * OfD::kBytes} {}
  __device__ __forceinline__ void round_own_packs() const {
    device::round_own_packs<P, count>(d);
    device::round_own_packs<P, count>(e);
  }
};

// Two places in shared memory for what passes: a step reads one while the next step's is copied to the other. After a
// step their addresses are exchanged. They are not numbered by `step % 2`: of the first step ptxas 13.0 makes
// `(step + 1) % 2` 0 instead of 1 in some kernels, so that the next step's rows overwrite those that are read.
struct Places {
  Address read, copied;

  __device__ __forceinline__ Places(Address begin, int bytes) : read(begin), copied(begin + bytes) {}
  __device__ __forceinline__ void exchange() {
    const Address other = read;
    read = copied;
    copied = other;
  }
};
static_assert(kStages == 2, "Places has two");

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
// The sum of what the four lanes of a row have.
__device__ __forceinline__ float sum_of_row(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// c (rows x columns) += a (rows x depth) b^T (depth x columns): a are the rows from `row` on, b those from `column` on.
template <class T, int fragments, int columns, int depth>
__device__ __forceinline__ void add_product_of_rows(Accumulators<fragments, columns>& c, SharedRows<T, depth> a,
                                                    int row, SharedRows<T, depth> b, int column = 0) {
  const int l = lane();
#pragma unroll
  for (int k = 0; k < a.kPacks / 2; ++k) {
    uint32_t own[fragments][4];
#pragma unroll
    for (int m = 0; m < fragments; ++m) load_matrices(own[m], a.pack(row + m * kMma + l % 16, 2 * k + l / 16));
#pragma unroll
    for (int n = 0; n < columns / kMma; ++n) {
      uint32_t others[4];
      load_matrices(others, b.pack(column + n * kMma + l % 8 + l / 16 * 8, 2 * k + l / 8 % 2));
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
                                            const Accumulators<fragments, depth>& p, SharedRows<T, width> b,
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
      load_transposed(others, b.pack(k * kMma + l % 16, first / b.kPerPack + 2 * n + l / 16));
#pragma unroll
      for (int m = 0; m < fragments; ++m) {
        multiply_add<T>(c.values[m][2 * n], own[m], others[0], others[1]);
        multiply_add<T>(c.values[m][2 * n + 1], own[m], others[2], others[3]);
      }
    }
  }
}

// The same in TF32, of eight rows of b at a time. A product's depth may be counted in any order that both operands
// have: where an instruction has the rows t and t + 4, these are the rows 2 t and 2 t + 1, as the accumulators have
// them. The order of a row's packs is that of the eighth row before it, and repeats after eight packs.
template <int fragments, int columns, int depth, int width>
__device__ __forceinline__ void add_product(Accumulators<fragments, columns>& c,
                                            const Accumulators<fragments, depth>& p, SharedRows<float, width> b,
                                            int first = 0) {
  constexpr int kPacks = 8, kPeriod = kPacks * b.kPerPack / 8;
  Address begin[kPeriod][2];
#pragma unroll
  for (int n = 0; n < kPeriod; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) begin[n][e] = b.number(own_column() + e, first + n * 8 + own_row());
  }
#pragma unroll
  for (int k = 0; k < depth / 8; ++k) {
    uint32_t own[fragments][4];
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
      const float (&x)[4] = p.values[m][k];
#pragma unroll
      for (int e = 0; e < 4; ++e) own[m][e % 2 * 2 + e / 2] = rounded_to_tf32(x[e]);
    }
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      uint32_t others[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Address from = begin[n % kPeriod][e] + k * 8 * b.kBytes + n / kPeriod * kPacks * kBytesOfPack;
        others[e] = __float_as_uint(read_shared_as<float>(from));
      }
#pragma unroll
      for (int m = 0; m < fragments; ++m) multiply_add<float>(c.values[m][n], own[m], others[0], others[1]);
    }
  }
}

// Writes c to rows from `row` on and columns from `first` on, below `existing` and `features`: of two neighbours x and
// y pair(x, y), which has the bits of both.
template <class T, int fragments, int columns, class Pair>
__device__ __forceinline__ void write(T* to, int64_t stride, const Accumulators<fragments, columns>& c, int row,
                                      int existing, int first, int features, const Pair& pair) {
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to_row = row + m * kMma + half * 8 + own_row();
      if (to_row >= existing) continue;
#pragma unroll
      for (int n = 0; n < columns / 8; ++n) {
        const int column = first + n * 8 + own_column();
        if (column >= features) continue;
        const float* x = c.values[m][n] + 2 * half;
        auto both = pair(x[0], x[1]);
        *reinterpret_cast<decltype(both)*>(to + to_row * stride + column) = both;
      }
    }
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
