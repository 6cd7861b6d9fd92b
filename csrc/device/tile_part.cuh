// What a thread has of a tile: which packs of which lines, where they lie in memory, and how they get from there to
// shared memory or to registers. geometry/tile.h explains the words.
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
  using Place = typename Mem::Place;
  using View = typename Mem::View;
  using RowIndex = typename Mem::RowIndex;
  static constexpr Tile kTile = Plan::kPlan;
  static constexpr TileGeometry kGeometry = geometry_of(View::kView, kTile, Plan::kFootprint);
  static_assert(kIsPlannedFor<Mem, Plan>);
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth, kThreads = kTile.threads;
  static constexpr int kMatrices = kTile.matrices, kElements = kTile.elements, kFold = kTile.fold, kPacks = kTile.packs;
  static constexpr int kGroups = kTile.lines_at_once, kLinesOfThread = kTile.lines_of_thread;
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
  // Whether pads have to replace elements of packs: masked ones, or those before or after the matrix.
  static constexpr bool kPutsPads = ((kFold > 1 && !kAligned) || Mem::kMasked) && Mem::kPlain;

  const Mem& mem;
  Pack* const shared;
  const int matrix, group, pack;  // the thread's: of the tile, of the matrix, of the line
  const int64_t outer;            // the matrix's number in the view: the index of the outer kept dimensions
  const int64_t first_element;    // of a line that the tile has
  const int elements;             // of a line, from that one on, that the tile has or reaches into
  const int span, first_line;     // of the block's part: span 0 unless folded; the line is the section's
  const bool exists;              // whether the view has that matrix
  Place base;                     // of the first element in the first line of the span or, not folded, of the matrix
  int shift;  // elements of the first pack of the thread's lines, or of the run, that come before them

  __device__ __forceinline__ TilePart(const Mem& mem, Pack* shared, int64_t tile, int part)
      : mem(mem),
        shared(shared),
        matrix(threadIdx.x / kThreadsOfMatrix),
        group(threadIdx.x % kThreadsOfMatrix / kPacks),
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
    shift = shift_of(group);
  }
  // Where an element lies that the first line of a matrix has.
  static __device__ __forceinline__ Place in_first_line(int64_t outer, int64_t element) {
    const Place matrix = Mem::template along_kept<View::kView.outer_kept()>(Place{}, static_cast<RowIndex>(outer));
    return Mem::template along_kept<Mem::kKeptDims, View::kView.outer_kept()>(matrix, static_cast<RowIndex>(element));
  }
  // The same as `shift`, of the lines of another group.
  __device__ __forceinline__ int shift_of(int group) const {
    if constexpr (kAligned) return 0;
    const unsigned begin = static_cast<unsigned>(base.element);  // its last bits count
    return (kFold > 1 ? begin : begin + group * static_cast<unsigned>(kInnermost.stride)) & (kWidth - 1);
  }

  // ---- the thread's packs

  // The place in shared memory of the thread's pack of its nth line, of operand k.
  __device__ __forceinline__ Pack* held(int nth, int k) const {
    return shared + (nth * kInputs + k) * kThreads + threadIdx.x;
  }
  // The thread's pack of a line: where its first element lies, and as bits which of its elements the tile has, and
  // which of those it stores. No bit is set if the line does not exist.
  struct At {
    Place line;
    int64_t element;
    int index;  // not folded: along the innermost reduced dimension; folded: of the first element in the run
    int over;   // not folded: along the other reduced dimensions
    unsigned inside, stored;
  };
  __device__ __forceinline__ At at(int nth) const {
    const int i = first_line + group + nth * kGroups;
    At at;
    if constexpr (kFold > 1) {
      at = at_folded(i);
    } else {
      at = at_line(i);
    }
    if (!exists) at.inside = 0;
    at.stored = at.inside;
    if constexpr (kReach > 0) {
      // The tile in which a pack begins stores it.
      const int first = pack * kWidth - shift;
      if (first >= kElements || (first < 0 && first_element > 0)) at.stored = 0;
    }
    return at;
  }
  // The pack of the i-th folded line of the span.
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
  // The pack of the i-th line of the matrix, counted over all spans.
  __device__ __forceinline__ At at_line(int i) const {
    const int over = kSpans == 1 ? 0 : static_cast<unsigned>(i) / static_cast<unsigned>(kSpan);
    const Place begin =
        kSpans == 1 ? base : Mem::template along_reduced<Mem::kReducedDims - 1>(base, static_cast<unsigned>(over));
    At at;
    at.index = i - over * kSpan;
    at.over = over;
    if constexpr (kPeriod > 1 && kSpans > 1) {
      // In each span, the place in a pack where line 0 begins is another one, since the strides of the other dimensions
      // need not be whole packs. In this period the thread takes the line that begins as its lines of the first span
      // do, and finds its index by dividing by the innermost stride, modulo the period. Modulo 2, 4 or 8 an odd number
      // is its own inverse.
      constexpr int kUnit = kWidth / kPeriod, kInverse = static_cast<int>(kInnermost.stride / kUnit);
      const int on = static_cast<int>(begin.element - base.element) / kUnit * kInverse;
      at.index = (at.index & -kPeriod) | ((at.index - on) & (kPeriod - 1));
    }
    at.line = begin.along(kInnermost, at.index);
    at.element = at.line.element + pack * kWidth - shift;
    at.inside = at.index < kExtent && over < kSpans ? bits_within<In>(pack * kWidth - shift, elements) : 0;
    return at;
  }
  // The number, in its row, of element e of a pack.
  __device__ __forceinline__ int column(const At& at, int e) const {
    if constexpr (kFold > 1) {
      return span * kExtent + static_cast<int>(static_cast<unsigned>(at.index + e) / static_cast<unsigned>(kInner));
    } else {
      return at.over * kExtent + at.index;
    }
  }
  // Where element e of a pack lies, in the side operands too.
  __device__ __forceinline__ Place place(const At& at, int e) const {
    if constexpr (kFold > 1) {
      const unsigned index = at.index + e, line = index / static_cast<unsigned>(kInner);
      Place first = in_first_line(outer, index - line * static_cast<unsigned>(kInner));
      first = Mem::template along_reduced<Mem::kReducedDims - 1>(first, static_cast<unsigned>(span));
      return first.along(kInnermost, line);
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
  // How the side operands of a pack's elements are read (see sides.cuh). Neighbours in a pack are neighbours in a side
  // operand as well if lines are not folded and have one kept dimension.
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
  // As bits, the elements of a pack that the tile has and that are not masked.
  __device__ __forceinline__ unsigned unmasked(const At& at) const {
    return mem.unmasked(Reader{*this, at}, at.inside);
  }

  // ---- their elements

  // Starts to copy the thread's packs to shared memory.
  __device__ __forceinline__ void copy() const {
#pragma unroll 4
    for (int t = 0; t < kLinesOfThread; ++t) {
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
  // Waits for the copies, and replaces elements that do not count by pads. There is no barrier: a thread reads only
  // what it has copied itself.
  __device__ __forceinline__ void finish_copy() const {
    wait_for_copies();
    if constexpr (kPutsPads) {
#pragma unroll 2
      for (int t = 0; t < kLinesOfThread; ++t) {
        const At at = this->at(t);
        const unsigned bits = unmasked(at);
        if (bits == Mem::kAll || !at.inside) continue;
        Pack raw[kInputs];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) raw[k] = *held(t, k);
        Mem::put_pads(raw, bits);
#pragma unroll
        for (int k = 0; k < kInputs; ++k) *held(t, k) = raw[k];
      }
    }
  }
  // Reads the thread's pack of its nth line from global memory; pads replace elements that do not count. The operands
  // before kFirst are not read.
  template <int kFirst>
  __device__ __forceinline__ void read(Pack (&raw)[kInputs], int nth) const {
    const At at = this->at(nth);
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      raw[k] = Mem::pad_pack(k);
      if (k >= kFirst && at.inside && nth < kLinesOfThread) raw[k] = Mem::load(mem.in(k) + at.element, at.inside);
    }
    if constexpr (kPutsPads) {
      const unsigned bits = unmasked(at);
      if (bits != Mem::kAll && at.inside) Mem::put_pads(raw, bits);
    }
  }
  // The values of the thread's pack of its nth line, from shared memory.
  __device__ __forceinline__ void values(typename Mem::Values& v, int nth) const {
    Pack raw[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) raw[k] = *held(nth, k);
    values_of(v, raw, nth);
  }
  // The values of that pack, from registers.
  __device__ __forceinline__ void values_of(typename Mem::Values& v, const Pack (&raw)[kInputs], int nth) const {
    if constexpr (Mem::kPlain) {
      mem.values(v, raw, OneElement<Place>{}, Mem::kAll);
    } else {
      const At at = this->at(nth);
      mem.values(v, raw, Reader{*this, at}, nth < kLinesOfThread ? unmasked(at) : 0);
    }
  }
};

}  // namespace jax_softmax::device
