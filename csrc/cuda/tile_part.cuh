// Where the packs of a tile lie that a thread has, and how it reads and writes them: see cuda/tile.cuh.
#pragma once

#include "cuda/access.cuh"
#include "cuda/copies.cuh"
#include "cuda/reduce.cuh"

namespace jax_softmax::cuda {

// How a thread gets from one of its lines to the next, `step` lines on, without a division: for two dimensions or one,
// unless lines take turns.
struct Stride {
  bool known;                // false: by a division after all
  bool plain;                // one dimension: nothing carries
  unsigned inner, extent;    // of the innermost dimension's index: added, and when it carries
  int64_t element, carried;  // added always, and with the carry
  int64_t mask, mask_carried;

  Stride() = default;
  Stride(const Dims& dims, int step, bool turning) : known(dims.size <= 2 && !turning), plain(dims.size <= 1) {
    const Dim none{1, 0, 0};
    const Dim last = dims.size > 0 ? dims.dim[dims.size - 1] : none, other = dims.size > 1 ? dims.dim[0] : none;
    const int64_t turns = dims.size > 1 ? step / last.extent : 0, rest = step - turns * last.extent;
    inner = static_cast<unsigned>(rest);
    extent = dims.size > 1 ? static_cast<unsigned>(last.extent) : INT32_MAX;
    element = turns * other.stride + rest * last.stride;
    carried = other.stride - last.extent * last.stride;
    mask = turns * other.mask_stride + rest * last.mask_stride;
    mask_carried = other.mask_stride - last.extent * last.mask_stride;
  }
};

template <class A>
struct TileArgs {
  A access;
  Tile tile;
  Strided kept;
  Strided lines;
  Stride next;
  Divisor cluster, packs, groups, unit, segment_packs, segment_tiles, inner, group, of_column;
  int team_shift, shuffled_shift, of_column_shift;  // powers of 2, the last one in runs of single elements' rows
  int begin_shift;                                  // and what the beginnings of lines that take turns are multiples of
  int64_t reach;                                    // from the first line to the last
};

// How a tile's lines lie in segments, see plan.h: some packs of several segments, a part of a segment, or runs.
enum class Lines { kSpanning, kPart, kRuns };

// Where a thread's packs of a tile lie. Lines of several dimensions take turns or, if none do, come in sets.
template <class A, bool kSeparate, Lines kLines, bool kTurns>
struct TilePart {
  using T = typename A::T;
  static constexpr int kWidth = A::kWidth;
  static constexpr bool kWhole = kLines == Lines::kSpanning;
  // Whether the thread's packs lie alike in all lines, so that it knows once and for all where in a line they begin.
  static constexpr bool kAlike = kSeparate || kWhole;

  // A line of the tile: where its pack or, if not alike, the line begins, where its part of the mask does, and the
  // index of its innermost dimension.
  struct Line {
    int64_t element;
    int64_t mask;
    unsigned inner;
  };
  // A pack: where it begins, the position in the segment or run, and whether all of its elements are the tile's.
  struct Place {
    int64_t begin;
    int position;
    bool whole;
  };

  const TileArgs<A>& args;
  const int rank;
  const Offset* const offsets;
  int group, place;  // which lines, and which of the tile's packs of them
  int segment;       // which of the tile's segments, if it has several
  int first;         // if alike: the position in the tile's part of a line that the thread's pack begins with
  int start;         // the position in the segment of that part
  unsigned bits;     // if a part of a segment: of the elements that are the tile's
  bool readable;     // whether all of the thread's packs that are there can be read whole
  bool storable;     // and stored so or, if a part of a segment, with no more than a look at `bits`
  Offset base;       // of the first line or, if alike, of the pack in it
  int first_line;
  int lines;  // of the thread
  Line top;   // the first of them

  // Writes down where a block's lines that take turns lie from the first one on, once for all threads: as ~element
  // those that are not there.
  static __device__ __forceinline__ void list_offsets(const TileArgs<A>& args, int rank, Offset* offsets) {
    const int last = args.lines.size - 1;
    const int64_t stride = args.lines.stride[last];
    for (int i = threadIdx.x; i < args.tile.block_lines; i += blockDim.x) {
      unsigned inner;
      Offset offset = args.lines.at(rank * args.tile.block_lines + i, &inner);
      // Of each turn of lines a thread has the one that begins as its others do: that many back as the other
      // dimensions' part of the offset shifts beginnings on. Modulo a power of 2 up to 8, odd numbers are their own
      // inverses.
      const int64_t outer = offset.element - inner * stride;
      const unsigned on =
          static_cast<unsigned>(outer >> args.begin_shift) * static_cast<unsigned>(stride >> args.begin_shift);
      const unsigned turned = (inner & -args.tile.turn) | ((inner - on) & (args.tile.turn - 1));
      const int by = static_cast<int>(turned - inner);
      offset = offset + Offset{by * stride, by * args.lines.mask_stride[last]};
      if (turned >= static_cast<unsigned>(args.tile.last_lines)) offset.element = ~offset.element;
      offsets[i] = offset;
    }
    __syncthreads();
  }

  // `offsets` lists the block's lines if they take turns; `set` is where the set begins that the block has lines of,
  // and `all_lines` how many there are.
  __device__ __forceinline__ TilePart(const TileArgs<A>& args, unsigned index, int rank, int all_lines,
                                      const Offset* offsets, Offset set)
      : args(args), rank(rank), offsets(offsets) {
    const Tile& tile = args.tile;
    group = args.packs.divide(threadIdx.x);
    place = threadIdx.x - group * tile.packs;
    if constexpr (kLines == Lines::kPart) {
      // The lanes that share columns have lines that begin alike.
      if (tile.shuffled) group = threadIdx.x / 32 + args.packs.divide(threadIdx.x % 32) * (blockDim.x / 32);
    }
    first_line = rank * tile.block_lines + group;
    segment = first = start = 0;
    bits = kAllBits<T>;
    unsigned at;
    bool active = group < tile.groups;
    if constexpr (kLines == Lines::kSpanning) {
      const unsigned pack = index * tile.packs + place;
      at = args.segment_packs.divide(pack);
      start = (pack - at * args.segment_packs.divisor) * kWidth;
      active = active && pack < tile.all_packs;
      base = set + segment_offset(at) + Offset{start, 0};
    } else if constexpr (kLines == Lines::kRuns) {
      segment = args.unit.divide(place);
      place -= segment * tile.unit;
      at = index * tile.segments + segment;
      active = active && at < tile.all_segments;
      base = set + segment_offset(at);
    } else {
      at = args.segment_tiles.divide(index);
      start = (index - at * tile.segment_tiles) * tile.width;
      base = set + segment_offset(at) + Offset{start, 0};
    }
    if constexpr (kAlike && !kWhole) {
      first = place * kWidth - shift_of(kLines == Lines::kRuns ? base.element : line(first_line).element);
      base.element += first;
    }
    if constexpr (kLines == Lines::kPart) {
      active = active && first < min(static_cast<int64_t>(tile.positions), tile.segment - start);
      bits = tile.halo ? A::bits_within(start + first, tile.segment)
                       : A::bits_within(first, min(static_cast<int64_t>(tile.width), tile.segment - start));
    }
    const int end = min((rank + 1) * tile.block_lines, all_lines);
    lines = active && first_line < end ? args.groups.divide(end - first_line - 1) + 1 : 0;
    top = line(first_line);
    readable = storable = true;
    if constexpr (!kWhole) {
      // In runs, what is in a later line may begin a little sooner in memory: far less than this.
      const int64_t around = kLines == Lines::kRuns ? tile.run + tile.segment + 2 * kWidth : 0;
      const int64_t last =
          turning() ? base.element + args.reach : line(first_line + max(lines - 1, 0) * tile.groups).element;
      readable = top.element >= around && last + kWidth + around <= args.access.elements;
    }
    if constexpr (kLines == Lines::kRuns) {
      const unsigned behind = static_cast<unsigned>(args.lines.innermost() - 1) * static_cast<unsigned>(tile.segment);
      storable = kAlike && first >= 0 && behind + first + kWidth <= static_cast<unsigned>(tile.run);
    }
    // A warp goes one way.
    readable = __all_sync(kFullWarp, readable || lines == 0);
    storable = __all_sync(kFullWarp, storable || lines == 0);
  }

  // Whether lines take turns.
  static __device__ __forceinline__ bool turning(const TileArgs<A>& args) {
    return kTurns && kLines == Lines::kPart && args.lines.size > 1;
  }
  __device__ __forceinline__ bool turning() const { return turning(args); }
  // Some of a turn of lines need not be there.
  __device__ __forceinline__ bool there(const Line& line) const {
    return kLines != Lines::kPart || args.lines.size <= 1 || line.inner < static_cast<unsigned>(args.tile.last_lines);
  }

  __device__ __forceinline__ Offset segment_offset(unsigned at) const {
    unsigned ignored;
    return args.kept.at(at, &ignored);
  }
  // How many elements beyond a whole pack something begins.
  static __device__ __forceinline__ int shift_of(int64_t element) { return static_cast<int>(element) & (kWidth - 1); }

  __device__ __forceinline__ Line line(int number) const {
    if (turning()) {
      const Offset offset = offsets[min(number - rank * args.tile.block_lines, args.tile.block_lines - 1)];
      const bool there = offset.element >= 0;
      return {base.element + (there ? offset.element : ~offset.element), base.mask + offset.mask,
              there ? 0u : static_cast<unsigned>(args.tile.last_lines)};
    }
    unsigned inner;
    const Offset offset = base + args.lines.at(number, &inner);
    return {offset.element, offset.mask, inner};
  }
  // To the next of the thread's lines, if they have one dimension.
  __device__ __forceinline__ void step(Line& line) const {
    line.inner += args.next.inner;
    line.element += args.next.element;
    if constexpr (A::kMasked) line.mask += args.next.mask;
  }
  // If they have one or two.
  __device__ __forceinline__ void step_and_carry(Line& line) const {
    step(line);
    const bool carries = line.inner >= args.next.extent;
    line.inner -= carries ? args.next.extent : 0;
    line.element += carries ? args.next.carried : 0;
    if constexpr (A::kMasked) line.mask += carries ? args.next.mask_carried : 0;
  }
  // From the i-th of them.
  __device__ __forceinline__ void advance(Line& line, int i) const {
    if (args.next.known) {
      step_and_carry(line);
    } else {
      line = this->line(first_line + (i + 1) * args.tile.groups);
    }
  }
  // Calls body(i, line, simple) for the thread's lines, with `simple` as a type.
  template <class Body>
  __device__ __forceinline__ void for_lines(bool simple, Body body) const {
    Line at = top;
    if (turning()) {
      const auto go = [&](auto is_simple) {
#pragma unroll 4
        for (int i = 0; i < lines; ++i) body(i, line(first_line + i * args.tile.groups), is_simple);
      };
      return simple ? go(std::true_type()) : go(std::false_type());
    }
    if (simple && args.next.plain) {
#pragma unroll 4
      for (int i = 0; i < lines; ++i, step(at)) body(i, at, std::true_type());
    } else if (simple) {
#pragma unroll 2
      for (int i = 0; i < lines; ++i) {
        body(i, at, std::true_type());
        advance(at, i);
      }
    } else {
#pragma unroll 2
      for (int i = 0; i < lines; ++i) {
        body(i, at, std::false_type());
        advance(at, i);
      }
    }
  }

  __device__ __forceinline__ Place place_in(const Line& line) const {
    if constexpr (kLines == Lines::kRuns) {
      const int here = kAlike ? first : place * kWidth - shift_of(line.element);
      const unsigned position = line.inner * static_cast<unsigned>(args.tile.segment) + here;
      return {kAlike ? line.element : line.element + here, static_cast<int>(position),
              static_cast<int>(position) >= 0 && position + kWidth <= static_cast<unsigned>(args.tile.run)};
    } else {
      return {line.element, start + first, kWhole || bits == kAllBits<T>};
    }
  }
  // Whether the tile stores the thread's packs: not those that it holds for its rows' sake alone.
  __device__ __forceinline__ bool owns() const {
    if constexpr (kLines == Lines::kPart) {
      if (args.tile.halo) return static_cast<unsigned>(max(start + first, 0) - start) < args.tile.width;
    }
    return true;
  }
  // The bits of a pack's elements that are the tile's.
  __device__ __forceinline__ unsigned own_bits(const Line& line, const Place& at) const {
    if constexpr (kLines == Lines::kRuns) return A::bits_within(at.position, args.tile.run);
    return there(line) ? bits : 0;
  }

  // The bits of a pack's elements that are the tile's and not masked.
  __device__ __forceinline__ unsigned kept_bits(const Line& line, const Place& at) const {
    const unsigned own = own_bits(line, at);
    if constexpr (!A::kMasked) return own;
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (!((own >> i) & 1)) continue;
      const unsigned position = static_cast<unsigned>(at.position + i), outer = args.inner.divide(position);
      const int64_t offset =
          outer * args.tile.outer_mask + (position - outer * args.inner.divisor) * args.tile.inner_mask;
      kept |= static_cast<unsigned>(args.access.mask[line.mask + offset]) << i;
    }
    return kept;
  }

  // Copies the thread's pack of a line, of operand k to held(k), from the operand kFirst on. Where it is not simple,
  // `mend` is to be called when the copies have arrived.
  template <bool kSimple, int kFirst = 0, class Held>
  __device__ __forceinline__ void copy(const Line& line, Held held) const {
    const auto at = place_in(line);
    const bool whole = there(line) && (kSimple || args.access.whole_in_memory({at.begin, 0}, 0));
#pragma unroll
    for (int k = kFirst; k < A::kInputs; ++k) {
      if (whole) {
        copy_pack(held(k), args.access.in[k] + at.begin);
      } else {
        const unsigned own = own_bits(line, at);
        *held(k) = select_elements<T>(own, load_elements(args.access.in[k] + at.begin, own), A::pad_pack(k));
      }
    }
  }

  // Whether there is something to be mended: what other rows have of a pack does not matter if they are told apart.
  __device__ __forceinline__ bool mends() const { return A::kMasked || (kLines == Lines::kRuns && !storable); }
  // Puts pads in the place of what is masked or beyond a run.
  template <int kFirst = 0, class Held>
  __device__ __forceinline__ void mend(const Line& line, Held held) const {
    const auto at = place_in(line);
    if (!A::kMasked && at.whole) return;
    const unsigned kept = kept_bits(line, at);
    if (kept == kAllBits<T>) return;
#pragma unroll
    for (int k = kFirst; k < A::kInputs; ++k) *held(k) = select_elements<T>(kept, *held(k), A::pad_pack(k));
  }

  template <bool kSimple>
  __device__ __forceinline__ void store(const Line& line, Pack result) const {
    const auto at = place_in(line);
    if constexpr (A::kMasked) result = A::with_masked(result, kept_bits(line, at));
    if (kLines == Lines::kPart ? own_bits(line, at) == kAllBits<T> : kSimple || at.whole) {
      store_pack(args.access.out + at.begin, result);
    } else {
      store_elements(args.access.out + at.begin, result, own_bits(line, at));
    }
  }
};

}  // namespace jax_softmax::cuda
