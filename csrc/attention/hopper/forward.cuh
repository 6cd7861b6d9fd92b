// forward.cuh's kernel on Hopper: the same steps and functions, with products by `wgmma` and copies by tensor maps.
//
// A block has some warpgroups of 64 queries each, which compute, and a last one, which copies: q once, and the keys and
// values of each step to one of kStages places. Two barriers of a place say that its keys or its values are there, two
// more that all warps have read them. Warpgroups take turns in multiplying keys, so that the others compute weights or
// multiply values meanwhile.
//
// Rows of q, k and v are in shared memory in panels of 64 features, as tensor maps with 128 bytes of swizzling copy
// them and `wgmma` reads them. Side operands pass as in forward.cuh, together with values.
#pragma once

#include "attention/forward.cuh"
#include "attention/hopper/warpgroup.cuh"

namespace jax_softmax::device {

using attention::kBytesOfPanelRow;
using attention::kMapDims;
using attention::kPanel;
using attention::kRowsOfWarpgroup;

// A matrix in shared memory, as copies of boxes lay it out. `panel`: bytes from 64 columns to the next 64, if the
// columns are not those of the sum.
__device__ __forceinline__ uint64_t descriptor(Address first, int panel) {
  return static_cast<uint64_t>((first & 0x3ffff) >> 4) | static_cast<uint64_t>(panel >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;  // 1024 bytes from 8 rows to the next 8; swizzled
}

// Rows in shared memory: panels of 64 features, one behind the other.
template <int rows, int features>
struct Panels {
  static constexpr int kPanels = ceil_div(features, kPanel), kPanelBytes = rows * kBytesOfPanelRow;
  static constexpr int kBytes = kPanels * kPanelBytes;
  Address base;

  // Of 16 features from 16 k on, of all rows from `row` on; and of all features, of 16 rows from 16 k on. Constants are
  // added to a descriptor: one instruction for each product.
  __device__ __forceinline__ uint64_t of_features(int row, int k) const {
    return descriptor(base + row * kBytesOfPanelRow, 0) + (k / 4 * kPanelBytes + k % 4 * 32) / 16;
  }
  __device__ __forceinline__ uint64_t of_rows(int k) const {
    return descriptor(base, kPanelBytes) + k * kMma * kBytesOfPanelRow / 16;
  }
  // `at`: the map's indices of the first row; of features, the first index, all are copied.
  __device__ __forceinline__ void begin_copy(const attention::TensorMap& map, int (&at)[kMapDims],
                                             Address barrier) const {
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      at[0] = p * kPanel;
      begin_copy_of_box(base + p * kPanelBytes, map, at, barrier);
    }
  }
};

// Sets the indices, in the tensor map of an operand, of a row of batch index n.
template <class P>
__device__ __forceinline__ void locate(int (&at)[kMapDims], int operand, unsigned n, int row) {
  int index[P::kBatchDims + 1];
#pragma unroll
  for (int d = P::kBatchDims - 1; d >= 0; --d) {
    const unsigned extent = P::kExtents[d];
    index[d] = static_cast<int>(d == 0 ? n : n % extent);
    if (d > 0) n /= extent;
  }
#pragma unroll
  for (int d = 1; d < kMapDims; ++d) {
    const int of = P::kMapDims[operand][d - 1];
    at[d] = of == -2 ? 0 : of == -1 ? row : index[of];
  }
}

// What a block has in shared memory: q; keys and values of kStages steps; as many tiles of side operands; barriers.
template <class P>
struct Pipeline {
  using N = Counts<P>;
  using Queries = Panels<N::kRows, P::kFeatures>;
  using Keys = Panels<N::kStep, P::kFeatures>;
  using Values = Panels<N::kStep, P::kValueFeatures>;
  using Tile = ScoreTile<P, N::kRows, N::kStep>;
  static constexpr bool kHasSides = Tile::kStagedBytes > 0;
  static constexpr int kConsumers = N::kTiling.warps;

  int count = 0;  // of steps so far
  __device__ __forceinline__ int place() const { return count % kStages; }
  __device__ __forceinline__ int parity() const { return count / kStages % 2; }

  static __device__ __forceinline__ Queries queries() { return {shared_memory()}; }
  __device__ __forceinline__ Keys keys() const {
    return {shared_memory() + Queries::kBytes + place() * (Keys::kBytes + Values::kBytes)};
  }
  __device__ __forceinline__ Values values() const { return {keys().base + Keys::kBytes}; }
  __device__ __forceinline__ Address sides() const {
    return shared_memory() + Queries::kBytes + kStages * (Keys::kBytes + Values::kBytes) + place() * Tile::kStagedBytes;
  }
  static __device__ __forceinline__ Address barrier_of(int place, int which) {
    return shared_memory() + Queries::kBytes + kStages * (Keys::kBytes + Values::kBytes + Tile::kStagedBytes) +
           (place * 4 + which) * 8;
  }
  __device__ __forceinline__ Address has_keys() const { return barrier_of(place(), 0); }
  __device__ __forceinline__ Address has_values() const { return barrier_of(place(), 1); }
  __device__ __forceinline__ Address keys_are_read() const { return barrier_of(place(), 2); }
  __device__ __forceinline__ Address values_are_read() const { return barrier_of(place(), 3); }

  static __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int place = 0; place < kStages; ++place) {
        init_barrier(barrier_of(place, 0), 1);
        init_barrier(barrier_of(place, 1), kHasSides ? 1 + N::kThreads : 1);
        init_barrier(barrier_of(place, 2), kConsumers);
        init_barrier(barrier_of(place, 3), kConsumers);
      }
      publish_barriers();
    }
    barrier();
  }
};

// What the last warpgroup does for batch index n and queries from `first` on: one thread copies q, k and v, and all
// copy sides.
template <class P>
__device__ __forceinline__ void copy_for_others(const typename P::Addresses& operands, unsigned n, int first,
                                                const Range& range) {
  using Pipe = Pipeline<P>;
  const bool leads = threadIdx.x % Counts<P>::kThreads == 0;
  if (!Pipe::kHasSides && !leads) return;
  int q[kMapDims], k[kMapDims], v[kMapDims];
  locate<P>(q, attention::kQ, n, first);
  const SideOffsets<P> sides(operands, n);
  Pipe pipe;
  for (int step = range.first; step < range.last; ++step, ++pipe.count) {
    const int row = step * Counts<P>::kStep;
    wait(pipe.keys_are_read(), 1 - pipe.parity());
    if (leads) {
      const bool begins = pipe.count == 0;  // q is there with the first keys
      arrive_and_expect(pipe.has_keys(), Pipe::Keys::kBytes + (begins ? Pipe::Queries::kBytes : 0));
      if (begins) pipe.queries().begin_copy(operands.maps[attention::kQ], q, pipe.has_keys());
      locate<P>(k, attention::kK, n, row);
      pipe.keys().begin_copy(operands.maps[attention::kK], k, pipe.has_keys());
    }
    wait(pipe.values_are_read(), 1 - pipe.parity());
    if (leads) {
      arrive_and_expect(pipe.has_values(), Pipe::Values::kBytes);
      locate<P>(v, attention::kV, n, row);
      pipe.values().begin_copy(operands.maps[attention::kV], v, pipe.has_values());
    }
    if constexpr (Pipe::kHasSides) {
      typename Pipe::Tile{sides, pipe.sides(), first, row}.begin_copies();
      arrive_after_copies(pipe.has_values());
    }
  }
}

template <class P>
__device__ __forceinline__ void attention_forward_on_hopper(const typename P::Addresses& operands) {
  using T = typename P::T;
  using N = Counts<P>;
  using Pipe = Pipeline<P>;
  constexpr int kWarpgroups = N::kTiling.warps / attention::kWarpgroup, kBlocks = ceil_div(P::kQueries, N::kRows);
  constexpr int kWidth = attention::hopper_width(P::kValueFeatures);
  // Registers of each thread: at launch all have as many, then those that compute take what the others give.
  constexpr int kLaunched = (1 << 16) / (N::kTiling.threads() * N::kTiling.resident) / 8 * 8;
  constexpr int kLess = Pipe::kHasSides ? 96 : N::kTiling.resident > 1 ? 24 : 32;
  constexpr int kMore = ((kWarpgroups + 1) * kLaunched - kLess) / kWarpgroups / 8 * 8;

  const BlockIndex own = own_block<P>(kBlocks);
  const int block = kBlocks - 1 - own.row_block, first = block * N::kRows, warpgroup = own_warpgroup();
  const unsigned n = own.n;
  const Range range = visited<P>(operands, n, block, P::kQueries, P::kKeys);
  Pipe::init();
  if (warpgroup == kWarpgroups) {
    give_registers<kLess>();
    copy_for_others<P>(operands, n, first, range);
    return;
  }
  take_registers<kMore>();

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
  const auto pass = [&](int end) {                // steps that other warpgroups visit
    for (; step < end; ++step, ++pipe.count) {
      wait(pipe.has_keys(), pipe.parity());
      take_turn(warpgroup);
      next_turn();
      arrive_for_warp(pipe.keys_are_read());
      wait(pipe.has_values(), pipe.parity());
      arrive_for_warp(pipe.values_are_read());
    }
  };
  pass(min(own_range.first, range.last));
  for (; step < own_range.last; ++step, ++pipe.count) {
    wait(pipe.has_keys(), pipe.parity());
    take_turn(warpgroup);
    fence_products();
#pragma unroll
    for (int k = 0; k < N::kDepth / kMma; ++k) {
      WarpgroupProduct<T, N::kStep>::add_rows(s.values[0], pipe.queries().of_features(warpgroup * kRowsOfWarpgroup, k),
                                              pipe.keys().of_features(0, k), k == 0);
    }
    commit_products();
    wait_for_products(s.values[0]);
    next_turn();
    arrive_for_warp(pipe.keys_are_read());

    const typename Pipe::Tile tile{sides, pipe.sides(), first, step * N::kStep};
    if (Pipe::kHasSides) wait(pipe.has_values(), pipe.parity());
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
#pragma unroll
    for (int i = 0; i < N::kStep / 8; ++i) {
      const float (&x)[4] = s.values[0][i];
      p[i / 2][i % 2 * 2] = narrowed<T>(x[0], x[1]);
      p[i / 2][i % 2 * 2 + 1] = narrowed<T>(x[2], x[3]);
    }
    if (!Pipe::kHasSides) wait(pipe.has_values(), pipe.parity());
    fence_products();
#pragma unroll
    for (int k = 0; k < N::kStep / kMma; ++k) {
      WarpgroupProduct<T, kWidth>::add_columns(o.values[0], p[k], pipe.values().of_rows(k));
    }
    commit_products();
    wait_for_products(o.values[0]);
    arrive_for_warp(pipe.values_are_read());
  }
  pass(range.last);

  float factors[1][2];
  finish<P>(operands, n, first + row_of_warp, o, rows, factors);
}

}  // namespace jax_softmax::device
