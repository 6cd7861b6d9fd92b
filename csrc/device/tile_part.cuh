// The part of a tile that a thread has: which packs of which lines, where they lie in memory, and how they get from
// there to shared memory or to registers. What the words mean stands in tile.cuh.
#pragma once

#include "device/copies.cuh"
#include "device/memory.cuh"
#include "device/planned.cuh"
#include "geometry/tile.h"

namespace jax_softmax::device {

template <class Mem, class Plan>
struct TilePart {
  using Op = typename Mem::Op;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using Place = typename Mem::Place;
  using View = typename Mem::View;
  using RowIndex = typename Mem::RowIndex;
  static constexpr Tile kTile = Plan::kPlan;
  static constexpr TileGeometry kGeometry = geometry_of(View::kView, kTile, Plan::kCall);
  static_assert(kIsPlannedFor<Mem, Plan>);
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth, kThreads = kTile.threads;
  static constexpr int kArrays = kTile.matrices, kElements = kTile.elements, kFold = kTile.fold, kPacks = kTile.packs;
  static constexpr int kGroups = kTile.lines_at_once, kTurns = kTile.lines_of_thread;
  static constexpr bool kAligned = kTile.aligned;
  static constexpr int64_t kInner = kGeometry.elements_of_line;
  static constexpr typename Mem::Dim kAlong = Mem::reduced_dim(Mem::kReducedDims - 1);
  static constexpr int kExtent = kAlong.extent;
  static constexpr int kPeriod = kGeometry.period;
  static constexpr int kSpan = kGeometry.lines_of_span, kSpans = Mem::kColumns / kExtent;
  static constexpr int kLines = kGeometry.lines_of_block;
  static constexpr int kPartsOfShared = kGeometry.parts_of_section, kParts = kGeometry.parts;
  static constexpr int kTilesOfLine = kGeometry.tiles_of_line;
  static constexpr int kReached = kGeometry.reach, kRows = kGeometry.rows, kTeam = kGeometry.threads_of_matrix;
  // Whether packs may have elements of no row, or masked ones, that pads are put in the place of.
  static constexpr bool kMends = ((kFold > 1 && !kAligned) || Mem::kMasked) && Mem::kOrdered;

  const Mem& mem;
  Pack* const shared;
  const int array, group, pack;
  const int64_t outer;          // the array, as the index of the outer kept dimensions
  const int64_t first_element;  // of a line, in the tile
  const int elements;           // from there to the end of the line, or as many as the tile has
  const int span, first_line;
  const bool exists;  // whether there is such an array
  Place base;         // where that element lies in the first line: of the span if folded, or else of all
  int shift;          // how far the thread's lines, or the run, begin beyond a pack

  __device__ __forceinline__ TilePart(const Mem& mem, Pack* shared, int64_t tile, int part)
      : mem(mem),
        shared(shared),
        array(threadIdx.x / kTeam),
        group(threadIdx.x % kTeam / kPacks),
        pack(threadIdx.x % kPacks),
        outer(tile / kTilesOfLine * kArrays + (kArrays > 1 ? array : 0)),
        first_element(tile % kTilesOfLine * kElements),
        elements(static_cast<int>(min(static_cast<int64_t>(kElements + kReached), kInner - first_element))),
        span(part / kPartsOfShared),
        first_line(part % kPartsOfShared * kLines),
        exists(array < kArrays && (kArrays == 1 || outer < mem.operands.rows / kInner)) {
    base = in_first_line(outer, first_element);
    if constexpr (kFold > 1)
      base = Mem::template along_reduced<Mem::kReducedDims - 1>(base, static_cast<unsigned>(span));
    shift = shift_of(group);
  }
  // Where an element of an array's first line lies.
  static __device__ __forceinline__ Place in_first_line(int64_t outer, int64_t element) {
    const Place array = Mem::template along_kept<View::kView.outer_kept()>(Place{}, static_cast<RowIndex>(outer));
    return Mem::template along_kept<Mem::kKeptDims, View::kView.outer_kept()>(array, static_cast<RowIndex>(element));
  }
  // How far the lines of a group begin beyond a pack.
  __device__ __forceinline__ int shift_of(int group) const {
    if constexpr (kAligned) return 0;
    const unsigned begin = static_cast<unsigned>(base.element);  // its last bits count
    return (kFold > 1 ? begin : begin + group * static_cast<unsigned>(kAlong.stride)) & (kWidth - 1);
  }

  // ---- the thread's packs

  __device__ __forceinline__ Pack* held(int turn, int k) const {
    return shared + (turn * kInputs + k) * kThreads + threadIdx.x;
  }
  // The first element of the thread's pack of a line, and which of its elements are the tile's, or are stored: none if
  // the line is not there.
  struct At {
    Place line;
    int64_t element;
    int index;  // not folded: of the innermost reduced dimension; folded: of the pack's first element in the run
    int over;   // not folded: of the other reduced dimensions
    unsigned inside, stored;
  };
  __device__ __forceinline__ At at(int turn) const {
    const int i = first_line + group + turn * kGroups;
    At at;
    if constexpr (kFold > 1) {
      at = at_folded(i);
    } else {
      at = at_line(i);
    }
    if (!exists) at.inside = 0;
    at.stored = at.inside;
    if constexpr (kReached > 0) {
      // A pack that begins in another tile is that one's to store.
      const int first = pack * kWidth - shift;
      if (first >= kElements || (first < 0 && first_element > 0)) at.stored = 0;
    }
    return at;
  }
  // The same of the i-th folded line, of those of the span.
  __device__ __forceinline__ At at_folded(int i) const {
    constexpr int kRun = kExtent * static_cast<int>(kInner);
    At at;
    at.line = base;
    at.index = (i * kPacks + pack) * kWidth - shift;
    at.element = base.element + at.index;
    if constexpr (kAligned && Mem::kPacks) {
      at.inside = at.index < kRun ? Mem::kAll : 0;
    } else {
      const bool whole = at.index >= 0 && at.index <= kRun - kWidth;
      at.inside = whole ? Mem::kAll : i < kSpan ? bits_within<In>(at.index, kRun) : 0;
    }
    return at;
  }
  // The same of the i-th line, of those of all spans.
  __device__ __forceinline__ At at_line(int i) const {
    const int over = kSpans == 1 ? 0 : static_cast<unsigned>(i) / static_cast<unsigned>(kSpan);
    const Place begin =
        kSpans == 1 ? base : Mem::template along_reduced<Mem::kReducedDims - 1>(base, static_cast<unsigned>(over));
    At at;
    at.index = i - over * kSpan;
    at.over = over;
    if constexpr (kPeriod > 1 && kSpans > 1) {
      // The line of this period that begins as the thread's others do: so many back as the other dimensions shift
      // beginnings on. Modulo a power of 2 up to 8, odd numbers are their own inverses; modulo 16, their cubes are.
      constexpr int kUnit = kWidth / kPeriod, kOdd = static_cast<int>(kAlong.stride / kUnit % kPeriod);
      constexpr int kInverse = kPeriod == 16 ? kOdd * kOdd * kOdd : static_cast<int>(kAlong.stride / kUnit);
      const int on = static_cast<int>(begin.element - base.element) / kUnit * kInverse;
      at.index = (at.index & -kPeriod) | ((at.index - on) & (kPeriod - 1));
    }
    at.line = begin.along(kAlong, at.index);
    at.element = at.line.element + pack * kWidth - shift;
    at.inside = at.index < kExtent && over < kSpans ? bits_within<In>(pack * kWidth - shift, elements) : 0;
    return at;
  }
  // Which element of its row an element of a pack is.
  __device__ __forceinline__ int column(const At& at, int e) const {
    if constexpr (kFold > 1) {
      return span * kExtent + static_cast<int>(static_cast<unsigned>(at.index + e) / static_cast<unsigned>(kInner));
    } else {
      return at.over * kExtent + at.index;
    }
  }
  // Where an element of a pack lies in the side operands.
  __device__ __forceinline__ Place place(const At& at, int e) const {
    if constexpr (kFold > 1) {
      const unsigned index = at.index + e, line = index / static_cast<unsigned>(kInner);
      Place first = in_first_line(outer, index - line * static_cast<unsigned>(kInner));
      first = Mem::template along_reduced<Mem::kReducedDims - 1>(first, static_cast<unsigned>(span));
      return first.along(kAlong, line);
    } else {
      Place line = at.line;
      const Place begin = in_first_line(0, first_element);
      const Place here = in_first_line(0, first_element + pack * kWidth - shift + e);
      line.element += here.element - begin.element;
#pragma unroll
      for (int s = 0; s < Mem::kSides; ++s) line.side[s] += here.side[s] - begin.side[s];
      return line;
    }
  }
  // Where its elements lie, for what reads side operands (see sides.cuh). Not folded, those of a pack are neighbours
  // along the innermost kept dimension, if that alone makes up lines.
  struct Reader {
    const TilePart& part;
    const At& at;
    static constexpr Reading reading(int side) {
      const Strides& strides = Mem::strides_of(side);
      const int outer = View::kView.outer_kept(), last = Mem::kKeptDims - 1;
      if (kFold > 1 || outer != last) return Reading::kElements;
      if (strides.kept[last] == 0) return Reading::kOne;
      bool whole =
          kAligned && Mem::kPacks && strides.kept[last] == 1 && !Mem::is_index(side) && kElements % kWidth == 0;
      for (int d = 0; d < last; ++d) whole = whole && strides.kept[d] % kWidth == 0;
      for (int d = 0; d < Mem::kReducedDims; ++d) whole = whole && strides.reduced[d] % kWidth == 0;
      return whole ? Reading::kPack : Reading::kElements;
    }
    __device__ __forceinline__ Place place_of(int e) const { return part.place(at, e); }
  };
  // Of a pack's elements those that are the tile's and not masked.
  __device__ __forceinline__ unsigned kept(const At& at) const { return mem.unmasked(Reader{*this, at}, at.inside); }

  // ---- what they hold

  // Has the thread's packs copied to shared memory.
  __device__ __forceinline__ void copy() const {
#pragma unroll 4
    for (int t = 0; t < kTurns; ++t) {
      const At at = this->at(t);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        const In* const from = mem.in(k) + at.element;
        if (at.inside && Mem::kPacks) {
          copy_pack(held(t, k), from);
        } else {
          *held(t, k) = at.inside ? Mem::load(from, at.inside) : Mem::pad_pack(k);
        }
      }
    }
  }
  // Waits for the copies, and puts pads in the place of elements that are not to count: each thread reads only what
  // it has copied itself, so that there is no need for a barrier.
  __device__ __forceinline__ void finish_copy() const {
    wait_for_copies();
    if constexpr (kMends) {
#pragma unroll 2
      for (int t = 0; t < kTurns; ++t) {
        const At at = this->at(t);
        const unsigned bits = kept(at);
        if (bits == Mem::kAll || !at.inside) continue;
        Pack raw[kInputs];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) raw[k] = *held(t, k);
        Mem::mend(raw, bits);
#pragma unroll
        for (int k = 0; k < kInputs; ++k) *held(t, k) = raw[k];
      }
    }
  }
  // The thread's pack of a line, read where it is and with pads in the place of what does not count.
  template <int kFirst>
  __device__ __forceinline__ void read(Pack (&raw)[kInputs], int turn) const {
    const At at = this->at(turn);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      raw[k] = Mem::pad_pack(k);
      if (k >= kFirst && at.inside && turn < kTurns) raw[k] = Mem::load(mem.in(k) + at.element, at.inside);
    }
    if constexpr (kMends) {
      const unsigned bits = kept(at);
      if (bits != Mem::kAll && at.inside) Mem::mend(raw, bits);
    }
  }
  // The values of the thread's pack of a line that is held.
  __device__ __forceinline__ void values(typename Mem::Values& v, int turn) const {
    Pack raw[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) raw[k] = *held(turn, k);
    values_of(v, raw, turn);
  }
  // Those of a pack that has been read.
  __device__ __forceinline__ void values_of(typename Mem::Values& v, const Pack (&raw)[kInputs], int turn) const {
    if constexpr (Mem::kOrdered) {
      mem.values(v, raw, OneElement<Place>{}, Mem::kAll);
    } else {
      const At at = this->at(turn);
      mem.values(v, raw, Reader{*this, at}, turn < kTurns ? kept(at) : 0);
    }
  }
};

}  // namespace jax_softmax::device
