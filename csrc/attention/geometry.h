// Attention's tiles, shared memory and strides, which the planner and the kernels both count.
#pragma once

#include "geometry/view.h"

namespace jax_softmax::attention {

inline constexpr int kMostBatchDims = 6;
inline constexpr int kMma = 16;                    // rows of a fragment
inline constexpr int kBytesOfPack = 16;            // the unit of copies; a product of fragments is two packs deep
inline constexpr int kStages = 2;                  // buffers for the rows that pass: one is read, the other is copied.
                                                   // Of a tile of scores there is one, so that larger ones have room
inline constexpr int kMostSharedBytes = 99 << 10;  // of a block, on the smallest chips
inline constexpr int kCell = 64;                   // queries and keys of a cell: see `visited`

// A block has some rows that stay in shared memory, while others pass through it, step by step. Of a tile of scores,
// all pass.
enum class KernelKind {
  kForward,   // queries stay, keys and values pass: the output and the rows' numbers
  kKeys,      // keys and values stay, queries and cotangents pass: dk, dv
  kQueries,   // queries and cotangents stay, keys and values pass: dq
  kScores,    // a tile of scores stays, batch indices pass: the gradient of a bias that they share
  kTangents,  // as kForward, with tangents of queries, keys and values: the output's tangent as well
};
inline constexpr int kKernels = 5;
// In the order of KernelKind.
inline constexpr const char* kKernelNames[kKernels] = {"forward", "keys", "queries", "scores", "tangents"};

struct Tiling {
  int warps;        // of a block
  int fragments;    // of rows that stay, for each warp
  int step;         // rows that pass at a time; of a tile of scores, its keys
  int parts;        // blocks that share the features of dk and dv; each computes the weights
  int resident;     // blocks that a multiprocessor has registers for
  int copying = 0;  // warps beside the others that only copy, in the schedule for Hopper; otherwise all copy
  int stages = kStages;
  int same_rows = 1;  // warpgroups that have the same rows, on Hopper: of two, one makes dv and the other dk

  constexpr int rows() const { return warps / same_rows * fragments * kMma; }
  constexpr int threads() const { return (warps + copying) * 32; }
  constexpr int copying_threads() const { return (copying > 0 ? copying : warps) * 32; }
};

// Tilings by the larger number of features, of q and k or of v, and by KernelKind. Two fragments a warp halve the reads
// of shared memory, and take twice the accumulators. Every block fits into kMostSharedBytes.
struct TilingsOfFeatures {
  int most_features;
  Tiling by_kernel[kKernels];
};
inline constexpr TilingsOfFeatures kTilingsOf16Bits[] = {
    {64, {{4, 2, 64, 1, 2}, {4, 2, 32, 1, 2}, {4, 2, 32, 1, 2}, {4, 2, 64, 1, 2}, {4, 2, 32, 1, 2}}},
    {128, {{4, 2, 64, 1, 2}, {4, 1, 64, 1, 2}, {4, 2, 32, 1, 2}, {4, 1, 64, 1, 2}, {4, 1, 32, 1, 2}}},
    {256, {{4, 1, 32, 1, 1}, {4, 1, 16, 2, 1}, {4, 1, 16, 1, 1}, {2, 1, 32, 1, 2}, {2, 1, 16, 1, 1}}},
};
inline constexpr TilingsOfFeatures kTilingsOf32Bits[] = {
    {64, {{4, 2, 64, 1, 2}, {4, 2, 32, 1, 2}, {4, 2, 32, 1, 2}, {4, 1, 64, 1, 2}, {4, 1, 32, 1, 2}}},
    {128, {{4, 2, 16, 1, 2}, {4, 1, 16, 1, 2}, {4, 1, 16, 1, 2}, {2, 1, 32, 1, 2}, {2, 1, 16, 1, 2}}},
};
// Where scores read arrays of queries x keys, smaller ones leave room for these to pass as well.
inline constexpr TilingsOfFeatures kTilingsOf32BitsWithArrays[] = {
    {64, {{4, 1, 32, 1, 2}, {4, 1, 32, 1, 2}, {4, 1, 32, 1, 2}, {4, 1, 64, 1, 2}, {4, 1, 32, 1, 2}}},
    {128, {{4, 1, 16, 1, 2}, {2, 1, 16, 1, 2}, {2, 1, 16, 1, 2}, {2, 1, 32, 1, 2}, {2, 1, 16, 1, 2}}},
};
// On Hopper a block may have twice the shared memory.
inline constexpr TilingsOfFeatures kTilingsOf32BitsOnHopper[] = {
    kTilingsOf32Bits[0],
    {128, {{8, 2, 32, 1, 1}, {8, 1, 32, 1, 1}, {8, 1, 32, 1, 1}, {2, 1, 32, 1, 2}, {2, 1, 16, 1, 2}}},
};
inline constexpr int kFeaturesAtOnce = 8;  // of whose multiples there are kernels
constexpr int most_features(int bytes_of_number) { return bytes_of_number == 2 ? 256 : 128; }
// `stay`: how many rows stay. Where these are few, as in windows of pictures, blocks have fewer warps, but as many as
// copy the numbers of a step's rows.
constexpr Tiling tiling_of(KernelKind kernel, int64_t stay, int features, int value_features, int bytes_of_number,
                           bool reads_arrays, bool on_hopper) {
  const TilingsOfFeatures* row = bytes_of_number == 2 ? kTilingsOf16Bits
                                 : reads_arrays       ? kTilingsOf32BitsWithArrays
                                 : on_hopper          ? kTilingsOf32BitsOnHopper
                                                      : kTilingsOf32Bits;
  while (row->most_features < features || row->most_features < value_features) ++row;
  Tiling tiling = row->by_kernel[static_cast<int>(kernel)];
  while (tiling.warps % 2 == 0 && stay <= tiling.rows() / 2 && tiling.step <= tiling.threads() / 2) {
    tiling.warps /= 2;
    tiling.resident *= 2;
  }
  return tiling;
}

inline constexpr int kBlocksOfWave = 512;  // about twice as many as the largest chips run at a time: see `own_block`

// Features of a row in shared memory: those past the last one are 0.
constexpr int padded(int features, const Tiling& tiling) {
  const int unit = kMma * tiling.parts;
  return static_cast<int>(ceil_div(features, unit)) * unit;
}

// Packs from a row in shared memory to the next. `ldmatrix` reads eight rows at once, from different banks if the
// number is odd. Of a multiple of eight packs, their order in a row does it (SharedRows::pack).
constexpr int pitch(int padded_features, int bytes_of_number) {
  const int packs = padded_features * bytes_of_number / kBytesOfPack;
  return packs % 8 == 0 ? packs : packs | 1;
}

// What the backward kernels read of a row: its pivot, the logarithm of its sum, and rowsum(o * do).
inline constexpr int kBytesOfRow = 3 * 4;

constexpr int shared_bytes(KernelKind kernel, const Tiling& tiling, int features, int value_features,
                           int bytes_of_number) {
  const int of_q = kBytesOfPack * pitch(padded(features, tiling), bytes_of_number);
  const int both = of_q + kBytesOfPack * pitch(padded(value_features, tiling), bytes_of_number);
  if (kernel == KernelKind::kScores) return (tiling.rows() + tiling.step) * both;
  if (kernel == KernelKind::kTangents) return 2 * (tiling.rows() * of_q + kStages * tiling.step * both);
  const int staying = kernel == KernelKind::kForward ? of_q : both;
  const int passing = both + (kernel == KernelKind::kKeys ? kBytesOfRow : 0);
  return tiling.rows() * staying + kStages * tiling.step * passing;
}

// ---- The kernels on Hopper (hopper/), of numbers of 16 bits

inline constexpr int kWarpgroup = 4;  // warps, which multiply 64 rows together
inline constexpr int kRowsOfWarpgroup = kWarpgroup * kMma;
inline constexpr int kPanel = 64;  // features of a panel, of which a row has 128 bytes in shared memory
inline constexpr int kBytesOfPanelRow = 2 * kPanel;
inline constexpr int kBytesOfBarriers = 4 * 8;  // of a stage
inline constexpr int kMapDims = 5;              // of a tensor map
inline constexpr int kHopper = 90;              // its compute capability

// How many operands are read by tensor maps: q, k, v and, in backward kernels, do.
constexpr int mapped_operands(KernelKind kernel) { return kernel == KernelKind::kForward ? 3 : 4; }

// Columns of a product with rows of so many features, of an instruction: those of the panels, as it reads no others.
constexpr int hopper_width(int features) {
  return 64 < features && features <= 96 ? 96 : static_cast<int>(ceil_div(features, kPanel)) * kPanel;
}

// Whether a kernel has tilings below. `stay`: how many rows stay, of which a block has many. Of few features, where
// scores read arrays of queries x keys, most of what passes are these arrays, which other chips' kernels copy as well.
constexpr bool hopper_has(KernelKind kernel, int features, int value_features, int bytes_of_number, bool reads_arrays,
                          int64_t stay) {
  const bool few = features <= 32 && value_features <= 32;
  return kernel != KernelKind::kScores && kernel != KernelKind::kTangents && bytes_of_number == 2 &&
         stay > 2 * kRowsOfWarpgroup && !(few && reads_arrays);
}
// Tilings by the numbers of features. Where rows have few features, two blocks share a multiprocessor, so that one
// begins and ends while the other computes. `reads_arrays`: scores read arrays of queries x keys, which takes
// registers. What has no room for `stages` of 64 rows passes `less` rows at a time.
constexpr Tiling hopper_tiling_of(KernelKind kernel, int features, int value_features, bool reads_arrays) {
  const int most = features > value_features ? features : value_features;
  const int both = hopper_width(features) + hopper_width(value_features);
  const bool small = most <= 64 && !reads_arrays;
  const int stages = reads_arrays ? 2 : 3, less = reads_arrays ? 32 : 48;
  if (kernel == KernelKind::kKeys) {
    if (small) return {2 * kWarpgroup, 1, 128, 1, 1, kWarpgroup};
    if (both <= 320) return {2 * kWarpgroup, 1, both <= 256 ? 64 : less, 1, 1, kWarpgroup, stages};
    return {2 * kWarpgroup, 1, reads_arrays ? 48 : 64, 1, 1, kWarpgroup, 2, 2};
  }
  if (kernel == KernelKind::kQueries) {
    if (both <= 320 && hopper_width(features) <= (reads_arrays ? 128 : 192)) {
      return {(small ? 3 : 2) * kWarpgroup, 1, 64, 1, 1, kWarpgroup, stages};
    }
    return {2 * kWarpgroup, 1, less, 1, 1, kWarpgroup};
  }
  if (small) return {2 * kWarpgroup, 1, 64, 1, 2, kWarpgroup};
  if (most <= 64 || (most <= 128 && !reads_arrays)) return {3 * kWarpgroup, 1, most <= 64 ? 64 : 128, 1, 1, kWarpgroup};
  return {2 * kWarpgroup, 1, most <= 192 && value_features <= 128 ? 128 : 64, 1, 1, kWarpgroup};
}

constexpr int bytes_of_panels(int rows, int features) {
  return rows * static_cast<int>(ceil_div(features, kPanel)) * kBytesOfPanelRow;
}
// Of two warpgroups that have the same keys one gives the other its products, in float32.
constexpr int bytes_of_handed_products(const Tiling& tiling) {
  return tiling.same_rows == 1 ? 0 : kRowsOfWarpgroup * tiling.step * 4;
}
constexpr int hopper_shared_bytes(KernelKind kernel, const Tiling& tiling, int features, int value_features) {
  const int staying = bytes_of_panels(tiling.rows(), features) +
                      (kernel == KernelKind::kForward ? 0 : bytes_of_panels(tiling.rows(), value_features));
  const int passing = bytes_of_panels(tiling.step, features) + bytes_of_panels(tiling.step, value_features) +
                      (kernel == KernelKind::kKeys ? tiling.step * kBytesOfRow : 0);
  return staying + bytes_of_handed_products(tiling) + tiling.stages * (passing + kBytesOfBarriers);
}

// The part of a stage for a side operand of queries x keys that passes with the rows. 16 bytes between its rows put
// neighbouring rows into different banks.
constexpr int pitch_of_side(int keys, int bytes_of_element) { return keys * bytes_of_element + 16; }
constexpr int bytes_of_side(KernelKind kernel, const Tiling& tiling, int bytes_of_element) {
  const bool keys_stay = kernel == KernelKind::kKeys;
  const int queries = keys_stay ? tiling.step : tiling.rows(), keys = keys_stay ? tiling.rows() : tiling.step;
  return queries * pitch_of_side(keys, bytes_of_element);
}

// An operand's strides in elements; 0 along dimensions that it lacks.
struct Strides {
  int64_t batch[kMostBatchDims];
  int64_t i, j;  // along queries and along keys
};

// A kernel's only parameter: the addresses of its operands in the order of AddressIndex, then of the bounds of the
// steps that blocks visit (if kBounded), of side arrays, and of the results: o, the rows' numbers and, for a backward
// pass, what o lost by rounding, and then o's tangent; dk and dv; or dq; and then the sides' cotangents.
template <int n>
struct Addresses {
  void* address[n];
};
// The same on Hopper, where the first operands are copied by tensor maps.
struct alignas(64) TensorMap {
  char bytes[128];
};
template <int mapped, int n>
struct MappedAddresses {
  TensorMap maps[mapped];
  void* address[n];
};
enum AddressIndex {
  kQ,
  kK,
  kV,
  kOCotangent,         // of the backward kernels
  kNumbers,            // of each row its pivot, and log2(sum of exp(score - pivot))
  kDelta,              // rowsum(o * o_cotangent)
  kQTangent = kV + 1,  // of the kernel of tangents
  kKTangent,
  kVTangent,
};

}  // namespace jax_softmax::attention
