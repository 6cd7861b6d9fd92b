// What the planner and the kernels of attention both count: tiles, shared memory, strides.
#pragma once

#include "geometry/view.h"

namespace jax_softmax::attention {

inline constexpr int kMostBatchDims = 6;
inline constexpr int kMostFeatures = 256;
inline constexpr int kMma = 16;                    // rows of a fragment, and the depth of a product of fragments
inline constexpr int kNumbersPerPack = 8;          // numbers of 16 bits in 16 bytes, which rows are copied by
inline constexpr int kStages = 2;                  // of what passes: one is read while the other is copied
inline constexpr int kMostSharedBytes = 99 << 10;  // of a block, on the smallest chips

// Rows stay with a block while others pass it, in steps.
enum class KernelKind {
  kForward,  // queries stay, keys and values pass: the output and the rows' numbers
  kKeys,     // keys and values stay, queries and cotangents pass: dk, dv
  kQueries,  // queries and cotangents stay, keys and values pass: dq
};
inline constexpr int kKernels = 3;
inline constexpr const char* kKernelNames[kKernels] = {"forward", "keys", "queries"};  // in the order of KernelKind

struct Tiling {
  int warps;      // of a block
  int fragments;  // of rows that stay, for each warp
  int step;       // how many rows pass at a time
  int parts;      // how many blocks share the features of dk and dv, each of which makes the weights anew
  int resident;   // blocks that a multiprocessor has registers for

  constexpr int rows() const { return warps * fragments * kMma; }
  constexpr int threads() const { return warps * 32; }
};

// By the larger one of the numbers of features, in the order of KernelKind. Two fragments for each warp halve how often
// shared memory is read, and take twice the accumulators. Every block fits into kMostSharedBytes.
struct TilingsOfFeatures {
  int most_features;
  Tiling by_kernel[kKernels];
};
inline constexpr TilingsOfFeatures kTilings[] = {
    {64, {{4, 2, 64, 1, 2}, {4, 2, 32, 1, 2}, {4, 2, 32, 1, 2}}},
    {128, {{4, 2, 64, 1, 2}, {4, 1, 64, 1, 2}, {4, 2, 32, 1, 2}}},
    {256, {{4, 1, 32, 1, 1}, {4, 1, 16, 2, 1}, {4, 1, 16, 1, 1}}},
};
constexpr Tiling tiling_of(KernelKind kernel, int features, int value_features) {
  int row = 0;
  while (kTilings[row].most_features < features || kTilings[row].most_features < value_features) ++row;
  return kTilings[row].by_kernel[static_cast<int>(kernel)];
}

inline constexpr int kBlocksOfWave = 512;  // about two for each place on the largest chips: see `own_block`

// Features in shared memory, where those past the last one are 0.
constexpr int padded(int features, const Tiling& tiling) {
  const int unit = kMma * tiling.parts;
  return static_cast<int>(ceil_div(features, unit)) * unit;
}

// From one row in shared memory to the next, in packs. `ldmatrix` reads eight rows at once, which must lie in different
// banks: an odd number of packs sees to that, or, where the packs are a multiple of eight, their order
// (SharedRows::pack).
constexpr int pitch(int padded_features) {
  const int packs = padded_features / kNumbersPerPack;
  return packs % 8 == 0 ? packs : packs | 1;
}

// The numbers that the softmax of a row needs again: its pivot and the logarithm of its sum, and rowsum(o * do).
inline constexpr int kBytesOfRow = 3 * 4;

constexpr int bytes_of_one(int features, int value_features, const Tiling& tiling) {
  return 16 * (pitch(padded(features, tiling)) + pitch(padded(value_features, tiling)));
}
constexpr int shared_bytes(KernelKind kernel, int features, int value_features) {
  const Tiling tiling = tiling_of(kernel, features, value_features);
  const int both = bytes_of_one(features, value_features, tiling);
  const int staying = kernel == KernelKind::kForward ? 16 * pitch(padded(features, tiling)) : both;
  const int passing = both + (kernel == KernelKind::kKeys ? kBytesOfRow : 0);
  return tiling.rows() * staying + kStages * tiling.step * passing;
}

// What an array of queries x keys that scores read takes of a stage, if it passes with the rows that pass. The 16 bytes
// between its rows see to it that neighbouring rows lie in different banks.
constexpr int pitch_of_side(int keys, int bytes_of_element) { return keys * bytes_of_element + 16; }
constexpr int bytes_of_side(KernelKind kernel, const Tiling& tiling, int bytes_of_element) {
  const bool keys_stay = kernel == KernelKind::kKeys;
  const int queries = keys_stay ? tiling.step : tiling.rows(), keys = keys_stay ? tiling.rows() : tiling.step;
  return queries * pitch_of_side(keys, bytes_of_element);
}

// How far apart neighbours along each dimension lie in an operand, in elements; 0 along those that it lacks.
struct Strides {
  int64_t batch[kMostBatchDims];
  int64_t i, j;  // along queries and along keys
};

// A kernel's only parameter: the addresses of its operands, in this order. After these come the steps that blocks
// visit, if they are bounded, the arrays that scores read, and the results: o and rows' numbers; dk and dv; dq.
template <int n>
struct Addresses {
  void* address[n];
};
enum AddressIndex {
  kQ,
  kK,
  kV,
  kOCotangent,  // from here on in the backward kernels alone
  kNumbers,     // of each row its pivot, and log2(sum of exp(score - pivot))
  kDelta,       // rowsum(o * o_cotangent)
};

}  // namespace jax_softmax::attention
