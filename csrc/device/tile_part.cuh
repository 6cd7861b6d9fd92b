// A thread's packs of a tile: which they are, where they lie in memory, and how they are read into shared memory or
// registers. geometry/tile.h explains the words.
#pragma once

#include "device/barrier.cuh"
#include "device/memory.cuh"
#include "geometry/tile.h"

namespace jax_softmax::device {

template <class Mem, class Plan>
struct TilePart {
  using Op = typename Mem::Op;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using Offsets = typename Mem::Offsets;
  using View = typename Mem::View;
  using RowIndex = typename Mem::RowIndex;
  static constexpr Tile kTile = Plan::kPlan;
  static constexpr TileGeometry kGeometry = geometry_of(View::kView, kTile, Plan::kFootprint);
  static_assert(kIsPlannedFor<Mem, Plan>);
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth, kThreads = kTile.threads;
  static constexpr int kMatrices = kTile.matrices, kElements = kTile.elements, kFold = kTile.fold, kPacks = kTile.packs;
  static constexpr int kTeams = kTile.lines_at_once, kLinesOfThread = kTile.lines_of_thread;
  static constexpr bool kAligned = kTile.aligned;
  static constexpr int64_t kInner = kGeometry.elements_of_line;
  static constexpr typename Mem::Dim kInnermost = Mem::reduced_dim(Mem::kReducedDims - 1);
  static constexpr int kExtent = kInnermost.extent;
  static constexpr int kPeriod = kGeometry.period;
  static constexpr int kSpan = kGeometry.lines_of_span, kSpans = Mem::kColumns / kExtent;
  static constexpr int kLines = kGeometry.lines_of_block;
  static constexpr int kPartsOfSection = kGeometry.parts_of_section, kParts = kGeometry.parts;
  static constexpr int kTilesOfLine = kGeometry.tiles_of_line;
  static constexpr int kReach = kGeometry.reach, kRows = kGeometry.rows, kThreadsOfMatrix = kGeometry.threads_of_matrix;
  // Whether packs may have elements that pads must replace: masked ones, or those outside of the matrix.
  static constexpr bool kPutsPads = ((kFold > 1 && !kAligned) || Mem::kMasked) && Mem::kIdentityLoad;

  const Mem& mem;
  Pack* const shared;
  const int matrix, team, pack;  // the thread's, in the tile, in the matrix and in the line
  const int64_t outer;           // the number of the matrix in the view
  const int64_t first_element;   // of a line, in the tile
  const int elements;            // of a line, from first_element on, that the tile has or reaches into
  const int span, first_line;    // of the part: its span (0 unless folded), and its first line in the section
  const bool exists;             // whether the view has that matrix
  Offsets base;                  // of first_element in the first line of the matrix or, folded, of the span
  int shift;                     // elements between the pack boundary before a line, or folded span, and its beginning

  __device__ __forceinline__ TilePart(const Mem& mem, Pack* shared, int64_t tile, int part)
      : mem(mem),
        shared(shared),
        matrix(threadIdx.x / kThreadsOfMatrix),
        team(threadIdx.x % kThreadsOfMatrix / kPacks),
        pack(threadIdx.x % kPacks),
        outer(tile / kTilesOfLine * kMatrices + (kMatrices > 1 ? matrix : 0)),
        first_element(tile % kTilesOfLine * kElements),
        elements(static_cast<int>(min(static_cast<int64_t>(kElements + kReach), kInner - first_element))),
        span(part / kPartsOfSection),
        first_line(part % kPartsOfSection * kLines),
        exists(matrix < kMatrices && (kMatrices == 1 || outer < mem.operands.rows / kInner)) {
    base = in_first_line(outer, first_element);
    if constexpr (kFold > 1)
      base = Mem::template along_reduced<Mem::kReducedDims - 1>(base, static_cast<unsigned>(span));
    shift = shift_of(team);
  }
  // The offsets of an element of the first line of a matrix.
  static __device__ __forceinline__ Offsets in_first_line(int64_t outer, int64_t element) {
    const Offsets matrix =
        Mem::template along_batch<View::kView.outer_batch()>(Offsets{}, static_cast<RowIndex>(outer));
    return Mem::template along_batch<Mem::kBatchDims, View::kView.outer_batch()>(matrix,
                                                                                 static_cast<RowIndex>(element));
  }
  // The `shift` of the lines of another team.
  __device__ __forceinline__ int shift_of(int team) const {
    if constexpr (kAligned) return 0;
    const unsigned begin = static_cast<unsigned>(base.element);  // its last bits count
    return (kFold > 1 ? begin : begin + team * static_cast<unsigned>(kInnermost.stride)) & (kWidth - 1);
  }

  // ---- the thread's packs

  // The address in shared memory of the thread's pack of its nth line, of operand k.
  __device__ __forceinline__ Pack* held(int nth, int k) const {
    return shared + (nth * kInputs + k) * kThreads + threadIdx.x;
  }
  // A pack of a line. `inside` and `stored` have as bits which of its elements the tile has, and which of those it
  // stores: none if the line does not exist.
  struct PackLocation {
    Offsets line;     // of the line's element first_element; folded: `base`
    int64_t element;  // the offset of the pack's first element
    int index;        // the line's index along the innermost reduced dimension; folded: the first element's in the span
    int over;         // the line's index along the other reduced dimensions; unused if folded
    unsigned inside, stored;
  };
  __device__ __forceinline__ PackLocation locate(int nth) const {
    const int i = first_line + team + nth * kTeams;
    PackLocation location;
    if constexpr (kFold > 1) {
      location = locate_folded(i);
    } else {
      location = locate_in_line(i);
    }
    if (!exists) location.inside = 0;
    location.stored = location.inside;
    if constexpr (kReach > 0) {
      // The tile in which a pack begins stores it.
      const int first = pack * kWidth - shift;
      if (first >= kElements || (first < 0 && first_element > 0)) location.stored = 0;
    }
    return location;
  }
  // The thread's pack of the i-th folded line of the span.
  __device__ __forceinline__ PackLocation locate_folded(int i) const {
    constexpr int kRun = kExtent * static_cast<int>(kInner);
    PackLocation location;
    location.line = base;
    location.index = (i * kPacks + pack) * kWidth - shift;
    location.element = base.element + location.index;
    if constexpr (kAligned && Mem::kPacks) {
      location.inside = location.index < kRun ? Mem::kAll : 0;
    } else {
      const bool whole = location.index >= 0 && location.index <= kRun - kWidth;
      location.inside = whole ? Mem::kAll : i < kSpan ? bits_within<In>(location.index, kRun) : 0;
    }
    return location;
  }
  // The thread's pack of the i-th line of the matrix, counted over all spans.
  __device__ __forceinline__ PackLocation locate_in_line(int i) const {
    const int over = kSpans == 1 ? 0 : static_cast<unsigned>(i) / static_cast<unsigned>(kSpan);
    const Offsets begin =
        kSpans == 1 ? base : Mem::template along_reduced<Mem::kReducedDims - 1>(base, static_cast<unsigned>(over));
    PackLocation location;
    location.index = i - over * kSpan;
    location.over = over;
    if constexpr (kPeriod > 1 && kSpans > 1) {
      // The first lines of two spans may begin at different offsets in a pack, since the strides of the other
      // dimensions need not be whole packs. The thread takes the line of this period that begins at the same offset as
      // its lines of the first span do. Its index is found by a division by the innermost stride, modulo the period:
      // modulo 2, 4 or 8 an odd number is its own inverse.
      constexpr int kUnit = kWidth / kPeriod, kInverse = static_cast<int>(kInnermost.stride / kUnit);
      const int on = static_cast<int>(begin.element - base.element) / kUnit * kInverse;
      location.index = (location.index & -kPeriod) | ((location.index - on) & (kPeriod - 1));
    }
    location.line = begin.along(kInnermost, location.index);
    location.element = location.line.element + pack * kWidth - shift;
    location.inside = location.index < kExtent && over < kSpans ? bits_within<In>(pack * kWidth - shift, elements) : 0;
    return location;
  }
  // The number of a pack's element e in its row.
  __device__ __forceinline__ int column(const PackLocation& location, int e) const {
    if constexpr (kFold > 1) {
      return span * kExtent +
             static_cast<int>(static_cast<unsigned>(location.index + e) / static_cast<unsigned>(kInner));
    } else {
      return location.over * kExtent + location.index;
    }
  }
  // The offsets of a pack's element e.
  __device__ __forceinline__ Offsets offsets_of(const PackLocation& location, int e) const {
    if constexpr (kFold > 1) {
      const unsigned index = location.index + e, line = index / static_cast<unsigned>(kInner);
      Offsets first = in_first_line(outer, index - line * static_cast<unsigned>(kInner));
      first = Mem::template along_reduced<Mem::kReducedDims - 1>(first, static_cast<unsigned>(span));
      return first.along(kInnermost, line);
    } else {
      Offsets line = location.line;
      const Offsets begin = in_first_line(0, first_element);
      const Offsets here = in_first_line(0, first_element + pack * kWidth - shift + e);
      line.element += here.element - begin.element;
#pragma unroll
      for (int s = 0; s < Mem::kSides; ++s) line.side[s] += here.side[s] - begin.side[s];
      return line;
    }
  }
  // See sides.cuh. Neighbours in a pack are neighbours in a side operand if lines are not folded and have one batch
  // dimension.
  struct Reader {
    const TilePart& part;
    const PackLocation& location;
    static constexpr Reading reading(int side) {
      const SideStrides& strides = Mem::strides_of(side);
      const int outer = View::kView.outer_batch(), last = Mem::kBatchDims - 1;
      if (kFold > 1 || outer != last) return Reading::kElements;
      if (strides.batch[last] == 0) return Reading::kOne;
      bool whole =
          kAligned && Mem::kPacks && strides.batch[last] == 1 && !Mem::is_index(side) && kElements % kWidth == 0;
      for (int d = 0; d < last; ++d) whole = whole && strides.batch[d] % kWidth == 0;
      for (int d = 0; d < Mem::kReducedDims; ++d) whole = whole && strides.reduced[d] % kWidth == 0;
      return whole ? Reading::kPack : Reading::kElements;
    }
    __device__ __forceinline__ Offsets offsets_of(int e) const { return part.offsets_of(location, e); }
  };
  // The elements of a pack that the tile has and that are not masked, as bits.
  __device__ __forceinline__ unsigned unmasked(const PackLocation& location) const {
    return mem.unmasked(Reader{*this, location}, location.inside);
  }

  // ---- reading them

  // Starts to copy the thread's packs to shared memory.
  __device__ __forceinline__ void copy() const {
#pragma unroll 4
    for (int t = 0; t < kLinesOfThread; ++t) {
      const PackLocation location = this->locate(t);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        const In* const from = mem.in(k) + location.element;
        if (location.inside && Mem::kPacks) {
          copy_pack(held(t, k), from);
        } else {
          *held(t, k) = location.inside ? Mem::load(from, location.inside) : Mem::pad_pack(k);
        }
      }
    }
  }
  // Waits for the thread's copies, and replaces elements that do not count by pads. A barrier is not needed: a thread
  // reads only the packs that it has copied.
  __device__ __forceinline__ void finish_copy() const {
    wait_for_copies();
    if constexpr (kPutsPads) {
#pragma unroll 2
      for (int t = 0; t < kLinesOfThread; ++t) {
        const PackLocation location = this->locate(t);
        const unsigned bits = unmasked(location);
        if (bits == Mem::kAll || !location.inside) continue;
        Pack raw[kInputs];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) raw[k] = *held(t, k);
        Mem::put_pads(raw, bits);
#pragma unroll
        for (int k = 0; k < kInputs; ++k) *held(t, k) = raw[k];
      }
    }
  }
  // Reads the thread's pack of its nth line from device memory, with pads for elements that do not count. Operands
  // before kFirst are not read.
  template <int kFirst>
  __device__ __forceinline__ void read(Pack (&raw)[kInputs], int nth) const {
    const PackLocation location = this->locate(nth);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      raw[k] = Mem::pad_pack(k);
      if (k >= kFirst && location.inside && nth < kLinesOfThread)
        raw[k] = Mem::load(mem.in(k) + location.element, location.inside);
    }
    if constexpr (kPutsPads) {
      const unsigned bits = unmasked(location);
      if (bits != Mem::kAll && location.inside) Mem::put_pads(raw, bits);
    }
  }
  // The values of the thread's pack of its nth line, from shared memory.
  __device__ __forceinline__ void values(typename Mem::Values& v, int nth) const {
    Pack raw[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) raw[k] = *held(nth, k);
    values_of(v, raw, nth);
  }
  // The same from registers.
  __device__ __forceinline__ void values_of(typename Mem::Values& v, const Pack (&raw)[kInputs], int nth) const {
    if constexpr (Mem::kIdentityLoad) {
      mem.values(v, raw, OneElement<Offsets>{}, Mem::kAll);
    } else {
      const PackLocation location = this->locate(nth);
      mem.values(v, raw, Reader{*this, location}, nth < kLinesOfThread ? unmasked(location) : 0);
    }
  }
};

}  // namespace jax_softmax::device
