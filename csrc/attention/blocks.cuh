// The problem that a kernel is compiled for, and which part of it a block has.
//
// The problem (see plan/attention.cc) is a struct P with these constants:
//
//   T                                  the type of q, k, v and of the results
//   kTiling, kQueries, kKeys, kFeatures, kValueFeatures
//   kBatchDims, kExtents               of q, last those along which blocks have the same rows; kGroups, their product
//   kMapDims                           on Hopper, of the tensor maps of q, k, v and, in backward kernels, do: what each
//                                      dimension but features is, a dimension of the batch, or -1 for rows, or -2 where
//                                      there is none
//   kQ, kK, kV, kO, kBounds            Strides; kBounded, whether there are bounds
//   kSides, kSideStrides, kSideAddresses   of what scores read beside; addresses of the arrays
//   kStagedBytes                       of each side the bytes of an element, if it passes through shared memory, or 0;
//   kSideStays                         whether it is the same for all that passes a tile of scores
//   kWeightFactor                      what the forward kernel multiplies o by, as `weight` leaves it out
//   kLostShift                         for a backward pass the forward kernel also writes, as int8, what o lost by
//                                      rounding: of the difference of float32's bits all but this many; 0 otherwise
//   kEmptyRowsAreZero                  the weights of a row whose scores are all -inf: 0, or NaN
//   score(x0, side), weight(y, side)   of the product x0 = q k^T, and of the softmax y of the scores
//   score_tangent(x1, x0, side)        of the product's tangent x1, in the kernel of tangents
//   score_transposed(g, x0, side), weight_transposed(t, side)   their linear maps, transposed, in the backward kernels
//                                      which ask side.known for the value of a mask
//   kSideCotangents                    how many sides' cotangents a backward kernel makes
//   side_cotangents(to, g, x0, y, t, side)   what a score adds to each of these: the first one is written for each
//                                      score if kWrites, as Written to an array with kWrittenStrides; others are sums
#pragma once

#include "attention/warp.cuh"

namespace jax_softmax::device {

using attention::kMma;
using attention::Strides;

// Constants that follow from a problem.
template <class P>
struct Counts {
  static constexpr attention::Tiling kTiling = P::kTiling;
  static constexpr int kRows = kTiling.rows(), kStep = kTiling.step, kThreads = kTiling.copying_threads();
  // Of which queries and keys are multiples if all tiles of an unbounded problem are whole. On Hopper each warpgroup
  // has a range of its own.
  static constexpr int kUnit = kTiling.copying > 0 || kRows < kStep ? kStep : kRows;
  static constexpr int kFragments = kTiling.fragments, kRowsOfWarp = kFragments * kMma;
  static constexpr int kDepth = attention::padded(P::kFeatures, kTiling);
  static constexpr int kWidth = attention::padded(P::kValueFeatures, kTiling);
};

// The offset of batch index n in an operand.
template <class P>
__device__ __forceinline__ int64_t begin_of(const Strides& strides, unsigned n) {
  int64_t offset = 0;
#pragma unroll
  for (int d = P::kBatchDims - 1; d >= 0; --d) {
    const unsigned extent = P::kExtents[d];
    offset += static_cast<int64_t>(d == 0 ? n : n % extent) * strides.batch[d];
    if (d > 0) n /= extent;
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
// `block`: of so many `rows`; `stay` and `pass`: how many rows of an operand stay and pass.
//
// Bounds are in cells of kCell x kCell scores, whatever the tiles are. Of each kCell rows that stay they say between
// which cells of those that pass all visible scores are, and between which ones cells are whole. A block visits all
// steps that have a part of a visible cell; a tile is whole if all its cells are.
template <class P, int rows = Counts<P>::kRows>
__device__ __forceinline__ Range visited(const typename P::Addresses& operands, unsigned n, int block, int stay,
                                         int pass) {
  using attention::kCell;
  constexpr int kStep = Counts<P>::kStep;
  const int steps = static_cast<int>(ceil_div(pass, kStep)), last_row = (block + 1) * rows;
  Range range{0, block * rows < stay ? steps : 0, 0, last_row <= stay ? pass / kStep : 0};
  if constexpr (P::kBounded) {
    const int* const bounds = static_cast<const int*>(operands.address[P::kBoundsAddress]) + begin_of<P>(P::kBounds, n);
    range.first = steps;
    range.last = 0;
#pragma unroll 1  // unrolled, it takes registers of the loop over tiles, and so blocks of the multiprocessor
    for (int cell = block * rows / kCell; cell * kCell < min(last_row, stay); ++cell) {
      const int* const ends = bounds + 4 * cell;
      range.first = min(range.first, max(ends[0], 0) * kCell / kStep);
      range.last = max(range.last, (ends[1] * kCell + kStep - 1) / kStep);
      range.first_whole = max(range.first_whole, (ends[2] * kCell + kStep - 1) / kStep);
      range.last_whole = min(range.last_whole, ends[3] * kCell / kStep);
    }
    range.last = min(range.last, steps);
  }
  return range;
}

// Calls f with whether a tile is whole, as a constant. f is compiled for both, unless all tiles are whole.
template <bool value>
struct Constant {
  static constexpr bool kValue = value;
};
template <class P, class F>
__device__ __forceinline__ void for_tile(bool is_whole, const F& f) {
  constexpr int kUnit = Counts<P>::kUnit;
  if (is_whole || (!P::kBounded && P::kQueries % kUnit == 0 && P::kKeys % kUnit == 0)) {
    f(Constant<true>{});
  } else {
    f(Constant<false>{});
  }
}

}  // namespace jax_softmax::device
