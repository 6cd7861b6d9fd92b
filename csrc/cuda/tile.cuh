// The schedule for rows that are not runs of memory: a block, or the blocks of a cluster, hold neighbouring rows in
// shared memory, read once and written once.
//
// Memory is seen as lines, runs of neighbouring elements one for each index of the reduced dimensions outside of it,
// and a tile is some packs of each line. Whatever the view, a thread's packs lie in lines so far apart that the same
// element of each belongs to the same row. So a thread keeps a state for each position in a pack (or one, if a pack
// belongs to one row), and needs no other index while it goes down the lines. Lines of several dimensions that begin
// anywhere take turns for that, and are listed once for a block.
//
// Threads that share rows add up their states by shuffles where lanes lie right, then through shared memory, and the
// blocks of a cluster send each other theirs. Memory is written in whole packs: where lines may begin anywhere in one,
// a tile reads some columns beyond its own, and stores the packs that begin in its own.
#pragma once

#include "cuda/chunk.cuh"

namespace jax_softmax::cuda {

// The state of `team` neighbouring lanes, a power of 2.
template <class Op, class M>
__device__ __forceinline__ State<typename M::Value> combine_over_team(State<typename M::Value> state, int team) {
  if constexpr (Op::kHasPivot) {
    auto pivot = state.pivot;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset < team) pivot = M::max(pivot, __shfl_xor_sync(kFullWarp, pivot, offset));
    }
    state.sum *= Relative<M>(pivot).rescale(state.pivot);
    state.pivot = pivot;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < team) state.sum += __shfl_xor_sync(kFullWarp, state.sum, offset);
  }
  return state;
}

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

// Where a thread's packs of a tile lie.
template <class A, bool kSeparate, Lines kLines>
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
      // Of each turn of lines a thread has the one that begins as its others do: that many back as the outer
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

  // `offsets` lists the block's lines if they take turns; `set` is where the set begins that the block has lines of.
  __device__ __forceinline__ TilePart(const TileArgs<A>& args, unsigned index, int rank, const Offset* offsets,
                                      Offset set)
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
    const int end = min((rank + 1) * tile.block_lines, tile.all_lines);
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

  // Whether lines take turns; some of a turn need not be there.
  static __device__ __forceinline__ bool turning(const TileArgs<A>& args) {
    return kLines == Lines::kPart && args.lines.size > 1;
  }
  __device__ __forceinline__ bool turning() const { return turning(args); }
  __device__ __forceinline__ bool there(const Line& line) const {
    return !turning() || line.inner < static_cast<unsigned>(args.tile.last_lines);
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

// The results of a pack, each of whose elements has a row of its own, or all the same.
template <class A, int n>
__device__ __forceinline__ Pack finish_separately(const typename A::Op::Row (&row)[n], const Pack (&raw)[A::kInputs]) {
  typename A::Values values;
  A::widen(values, raw);
  typename A::C results[A::kWidth];
#pragma unroll
  for (int e = 0; e < A::kWidth; ++e) results[e] = A::Op::finish(row[n == 1 ? 0 : e], values[e]);
  return Elements<typename A::T>::narrow(results);
}

// The states that a thread has after it has gone down its lines, and what becomes of them: together with those of the
// other threads that share rows with it, the state of each of the tile's rows, here called columns.
template <class A, bool kSeparate, Lines kLines>
struct TileStates {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  static constexpr int kWidth = A::kWidth, kInputs = A::kInputs;
  static constexpr int kWidthBits = kWidth == 8 ? 3 : kWidth == 4 ? 2 : 1;
  static constexpr int kStates = kSeparate ? kWidth : 1;
  static constexpr bool kWhole = kLines == Lines::kSpanning;

  C pivot[kStates];
  C sum[kStates];

  // Over lanes that share rows: combine(how far apart they are).
  template <class Combine>
  static __device__ __forceinline__ void over_lanes(const Tile& tile, Combine combine) {
    if constexpr (kSeparate) {
      if constexpr (kLines != Lines::kRuns) {
        if (!tile.shuffled) return;
        for (int offset = 16; offset >= tile.packs; offset /= 2) combine(offset);
      }
    } else {
      for (int offset = tile.shuffled / 2; offset > 0; offset /= 2) combine(offset);
    }
  }
  __device__ __forceinline__ void set_pivot(const Tile& tile, Pack largest) {
    if constexpr (!Op::kHasPivot) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) pivot[s] = M::constant(0);
    } else if constexpr (kSeparate) {
      over_lanes(tile, [&](int offset) {
        Pack other;
#pragma unroll
        for (int w = 0; w < 4; ++w) other.word[w] = __shfl_xor_sync(kFullWarp, largest.word[w], offset);
        largest = Elements<T>::max(largest, other);
      });
      Elements<T>::widen(pivot, largest);
    } else {
      pivot[0] = A::max_element(largest);
      over_lanes(tile, [&](int offset) { pivot[0] = M::max(pivot[0], __shfl_xor_sync(kFullWarp, pivot[0], offset)); });
    }
  }
  __device__ __forceinline__ void add(const C (&terms)[kWidth]) {
    if constexpr (kSeparate) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += terms[e];
    } else {
      C all = terms[0];
#pragma unroll
      for (int e = 1; e < kWidth; ++e) all += terms[e];
      sum[0] += all;
    }
  }
  __device__ __forceinline__ void add_lanes(const Tile& tile) {
    over_lanes(tile, [&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum[s] += __shfl_xor_sync(kFullWarp, sum[s], offset);
    });
  }

  // Where what belongs to a position, or a column, is in shared memory: a place is left free for each pack, so that
  // neighbouring lanes, each of which has a pack of them, do not get into each other's way.
  static __device__ __forceinline__ int slot_of(int position) { return position + (position >> kWidthBits); }
  // Calls use(s, slot) for those of a part of a segment that the thread has states of.
  template <class Use>
  static __device__ __forceinline__ void for_slots(const TilePart<A, kSeparate, kLines>& part, Use use) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kWhole) {
        use(s, part.place * (kWidth + 1) + s);
      } else {
        const int position = part.first + s;
        if (static_cast<unsigned>(position) < static_cast<unsigned>(part.args.tile.positions))
          use(s, slot_of(position));
      }
    }
  }

  // Calls publish(column, state, lane, lanes) for each of the tile's columns in as many lanes of a warp, by way of
  // `entries`.
  template <class Publish>
  __device__ __forceinline__ void combine(const TilePart<A, kSeparate, kLines>& part, State<C>* entries,
                                          Publish publish) const {
    const TileArgs<A>& args = part.args;
    const Tile& tile = args.tile;
    const int in_tile = part.segment * tile.unit + part.place;
    if constexpr (kSeparate) {
      const bool shuffled = kLines != Lines::kRuns && tile.shuffled;
      const bool writes = shuffled ? threadIdx.x % 32 < tile.packs : part.group < tile.groups;
      State<C>* const to = entries + (shuffled ? threadIdx.x / 32 : part.group) * tile.entries;
      if (writes) {
        // Positions count from where the segment, or the tile's part of it, begins.
        if constexpr (kLines == Lines::kRuns) {
          const int turn = tile.unit * kWidth;  // of whole columns
#pragma unroll
          for (int s = 0; s < kStates; ++s) {
            const int position = part.first + s;
            to[slot_of(part.segment * turn + position + (position < 0 ? turn : 0))] = {pivot[s], sum[s]};
          }
        } else {
          for_slots(part, [&](int s, int slot) { to[slot] = {pivot[s], sum[s]}; });
        }
      }
    } else if (part.group < tile.groups && in_tile % (1 << args.shuffled_shift) == 0) {
      entries[part.group * tile.entries + (in_tile >> args.shuffled_shift)] = {pivot[0], sum[0]};
    }
    __syncthreads();
    // A team of lanes adds up each column; warps without one have nothing to do.
    const int of_column = args.of_column.divisor, parts = of_column * tile.entry_rows, team = 1 << args.team_shift;
    const int lane = threadIdx.x % team, apart = kLines == Lines::kRuns ? static_cast<int>(tile.inner) : 1;
    for (int at = threadIdx.x; at - static_cast<int>(threadIdx.x % 32) < tile.columns * team; at += blockDim.x) {
      const int column = at >> args.team_shift, end = column < tile.columns ? parts : 0;
      State<C> state;
      if (of_column == 1) {
        const State<C>* const of_position = entries + (kSeparate ? slot_of(column) : column);
        state = combine_entries<Op, M>(lane, end, team, [&](int row) { return of_position[row * tile.entries]; });
      } else {
        const int group = kLines == Lines::kRuns ? static_cast<int>(tile.group) : 1;
        int from = column * of_column;  // the first position
        if constexpr (kLines == Lines::kRuns) {
          const int of_segment = kSeparate ? tile.unit * kWidth : of_column;
          from = column * group + static_cast<int>(args.inner.divide(column * group)) * (of_segment - apart);
        }
        // Of rows of single elements in runs, a column has 1, 2, 4 or 8 positions. A lane's parts are all at one of
        // them, if there are lanes enough.
        constexpr bool kSingle = kSeparate && kLines == Lines::kRuns;
        const auto slot = [&](int position) { return kSeparate ? slot_of(position) : position; };
        if (kSingle && group == 1 && team >= of_column) {
          const int row_of_lane = lane >> args.of_column_shift;
          const State<C>* const of_position =
              entries + slot(from + (lane - (row_of_lane << args.of_column_shift)) * apart);
          state = combine_entries<Op, M>(row_of_lane, end >> args.of_column_shift, team >> args.of_column_shift,
                                         [&](int row) { return of_position[row * tile.entries]; });
        } else {
          state = combine_entries<Op, M>(lane, end, team, [&](int i) {
            const int row = args.of_column.divide(i), part = i - row * of_column;
            const int turn = kSingle ? args.group.divide(part) : part;
            return entries[row * tile.entries + slot(from + turn * apart + (kSingle ? part - turn * group : 0))];
          });
        }
      }
      state = combine_over_team<Op, M>(state, team);
      if (column < tile.columns) publish(column, state, lane, team);
    }
  }

  // Calls use(s, column) for the column that each of the thread's states belongs to.
  template <class Use>
  static __device__ __forceinline__ void for_columns(const TilePart<A, kSeparate, kLines>& part, Use use) {
    const Tile& tile = part.args.tile;
    if constexpr (kLines == Lines::kRuns) {
      const int inner = static_cast<int>(tile.inner), rows = part.args.group.divide(inner);  // of a segment
      const int ahead = part.first + inner * kWidth;                                         // not negative
      int in_segment = kSeparate ? ahead - static_cast<int>(part.args.inner.divide(ahead)) * inner : 0;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        use(s, min(part.segment, tile.segments - 1) * rows + static_cast<int>(part.args.group.divide(in_segment)));
        if (++in_segment == inner) in_segment = 0;
      }
    } else {
      const int first =
          kSeparate ? (kWhole ? part.place * kWidth : part.first) : part.place >> part.args.shuffled_shift;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const int position = kWhole ? first + s : min(max(first + s, 0), tile.positions - 1);
        use(s, part.args.of_column.divide(position));
      }
    }
  }
};

// How the results are made of a row's state: terms that are kept need its scale alone.
template <class A>
inline constexpr bool kTileKeepsTerms = A::Op::kResultIsScaledTerm && sizeof(typename A::T) == sizeof(typename A::C);

template <class A, bool kSeparate, Lines kLines>
__global__ void __launch_bounds__(kTileThreads, 3) rows_in_tile(const __grid_constant__ TileArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  using States = TileStates<A, kSeparate, kLines>;
  constexpr int kWidth = A::kWidth, kInputs = A::kInputs, kStates = States::kStates;
  constexpr bool kKeepsTerms = kTileKeepsTerms<A>;
  using Final = std::conditional_t<kKeepsTerms, State<C>, typename Op::Row>;
  extern __shared__ __align__(128) Pack shared[];
  const A& access = args.access;
  const Tile& tile = args.tile;
  const int threads = blockDim.x;
  const unsigned index = args.cluster.divide(blockIdx.x);
  const int rank = blockIdx.x - index * tile.cluster;
  const bool clustered = tile.cluster > 1;
#if __CUDA_ARCH__ >= 900
  uint64_t* const received =
      reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(shared + tile.held * kInputs * threads) + tile.received_at);
  if (clustered) begin_exchange(received, tile.cluster * tile.columns * static_cast<int>(sizeof(State<C>)));
#endif
  using Part = TilePart<A, kSeparate, kLines>;
  Offset* const offsets = reinterpret_cast<Offset*>(reinterpret_cast<char*>(shared) + tile.offsets_at);
  if (Part::turning(args)) Part::list_offsets(args, rank, offsets);
  const Part part(args, index, rank, offsets, {0, 0});

  // Each thread reads only what it has copied itself, so that there is no need for a barrier.
  Pack* const mine = shared + threadIdx.x;
  const auto at = [&](int i, int k) { return mine + (i * kInputs + k) * threads; };
  part.for_lines(part.readable, [&](int i, const auto& line, auto simple) {
    part.template copy<decltype(simple)::value>(line, [&](int k) { return at(i, k); });
  });
  wait_for_copies();
  if (part.mends()) {
    part.for_lines(part.storable,
                   [&](int i, const auto& line, auto) { part.mend(line, [&](int k) { return at(i, k); }); });
  }

  States states;
  Pack largest = A::pad_pack(0);
  if constexpr (Op::kHasPivot) {
#pragma unroll 8
    for (int i = 0; i < part.lines; ++i) largest = Elements<T>::max(largest, *at(i, 0));
  }
  states.set_pivot(tile, largest);
  {
    Relative<M> relative[kStates];
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      relative[s] = Relative<M>(states.pivot[s]);
      states.sum[s] = M::constant(0);
    }
#pragma unroll 4
    for (int i = 0; i < part.lines; ++i) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = *at(i, k);
      typename A::Values values;
      A::widen(values, raw);
      C terms[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) terms[e] = Op::term(relative[kSeparate ? e : 0], values[e]);
      if constexpr (kKeepsTerms) *at(i, 0) = Elements<T>::narrow(terms);
      states.add(terms);
    }
    states.add_lanes(tile);
  }

  const auto final_of = [](const State<C>& state) -> Final {
    if constexpr (kKeepsTerms) {
      return state;
    } else {
      return Op::row(state);
    }
  };
  Final final[kStates];
  if (!tile.exchanged) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) final[s] = final_of({states.pivot[s], states.sum[s]});
  } else {
    static_assert(sizeof(Final) <= kPackBytes);
    char* const beyond = reinterpret_cast<char*>(shared + tile.held * kInputs * threads);
    State<C>* const entries = reinterpret_cast<State<C>*>(beyond);
    uint64_t* const of_blocks = reinterpret_cast<uint64_t*>(beyond + tile.of_blocks_at);
    Final* const finals = reinterpret_cast<Final*>(beyond + tile.finals_at);
    const auto final_at = [&](int column) -> Final& { return finals[States::slot_of(column)]; };
#if __CUDA_ARCH__ >= 900
    if (clustered) wait_until_all_have_begun();
#endif
    states.combine(part, entries, [&](int column, const State<C>& state, int lane, int team) {
      if (clustered) {
#if __CUDA_ARCH__ >= 900
        const WordsInCluster<C> exchange{of_blocks, received};
        for (int block = lane; block < tile.cluster; block += team) {
          exchange.publish(rank * tile.columns + column, state, block);
        }
#endif
      } else if (lane == 0) {
        final_at(column) = final_of(state);
      }
    });
#if __CUDA_ARCH__ >= 900
    if (clustered) {
      wait_for_cluster(received, 0);
      __syncthreads();  // the entries have been read, and make room
      const int team = 1 << args.team_shift, lane = threadIdx.x % team;
      for (int at = threadIdx.x; at - static_cast<int>(threadIdx.x % 32) < tile.columns * team; at += threads) {
        const int column = at >> args.team_shift;
        const State<C> state = combine_over_team<Op, M>(
            combine_entries<Op, M>(lane, column < tile.columns ? tile.cluster : 0, team,
                                   [&](int block) {
                                     uint64_t words[kStateWords<C>];
#pragma unroll
                                     for (int w = 0; w < kStateWords<C>; ++w) {
                                       words[w] = of_blocks[(block * tile.columns + column) * kStateWords<C> + w];
                                     }
                                     return from_words(words);
                                   }),
            team);
        if (lane == 0 && column < tile.columns) final_at(column) = final_of(state);
      }
    }
#endif
    __syncthreads();
    if (kSeparate && kLines != Lines::kRuns && tile.inner == 1) {
      States::for_slots(part, [&](int s, int slot) { final[s] = finals[slot]; });
    } else {
      States::for_columns(part, [&](int s, int column) { final[s] = final_at(column); });
    }
  }

  typename Op::Scale scale[kStates];
  if constexpr (kKeepsTerms) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) scale[s] = Op::term_scale(final[s], states.pivot[s]);
  }
  const auto result_of = [&](int i) {
    Pack raw[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) raw[k] = *at(i, k);
    if constexpr (kKeepsTerms) {
      C terms[kWidth];
      Elements<T>::widen(terms, raw[0]);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) terms[e] = terms[e] * scale[kSeparate ? e : 0];
      return Elements<T>::narrow(terms);
    } else {
      return finish_separately<A>(final, raw);
    }
  };
  if (!part.owns()) return;
  part.for_lines(part.storable, [&](int i, const auto& line, auto simple) {
    part.template store<decltype(simple)::value>(line, result_of(i));
  });
}

}  // namespace jax_softmax::cuda
