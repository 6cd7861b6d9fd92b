// The schedule `tile`, for rows that are not runs of memory: a block, or the blocks of a cluster, hold neighbouring
// rows in shared memory, read once and written once.
//
// Memory is seen as lines: for each index of the reduced dimensions the elements of all kept ones inside of them. A
// tile is a part of each line, so that a column of it is a row of the view. A thread has one pack of some of the lines,
// and a state for each element of it. Lines may begin anywhere in a pack: a thread then has lines that begin alike, and
// which columns its elements are of depends on that.
//
// Where lines are short and follow one another, several are folded into one of whole packs, all of an array is one run
// of memory, and a tile is one or more arrays. A row then has several columns of the folded line.
#pragma once

#include "device/copies.cuh"
#include "device/exchange.cuh"
#include "device/memory.cuh"

namespace jax_softmax::device {

constexpr int greatest_common_divisor(int a, int64_t b) { return b % a == 0 ? a : greatest_common_divisor(a / 2, b); }

template <class Mem, class View, class Plan>
struct TilePart {
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using Out = typename Mem::Out;
  using Place = typename Mem::Place;
  using Kept = typename View::Kept;
  using Reduced = typename View::Reduced;
  using RowIndex = typename Conditional<View::kWide, uint64_t, uint32_t>::type;
  static constexpr bool kTermsFit = Mem::kTermsFit && Plan::kHeld;  // in the place of elements that are held
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth, kThreads = Plan::kThreads;
  static constexpr int kArrays = Plan::kArrays, kColumns = Plan::kColumns, kFold = Plan::kFold;
  static constexpr int kPacks = Plan::kPacks;    // of a line of the tile
  static constexpr int kGroups = Plan::kGroups;  // of threads that share out the lines
  static constexpr int kTurns = Plan::kTurns;    // lines of a thread
  static constexpr bool kAligned = Plan::kAligned;
  static constexpr int64_t kInner = View::kInner;  // elements of a line of the view
  static constexpr Dim kAlong = Reduced::kDim[Reduced::kSize - 1];
  static constexpr int kExtent = kAlong.extent;
  // Lines so many apart begin alike in a pack.
  static constexpr int kPeriod = kAligned || kFold > 1 ? 1 : kWidth / greatest_common_divisor(kWidth, kAlong.stride);
  // The lines of the innermost reduced dimension, with some that are not there so that periods are whole, or folded.
  static constexpr int kSpan =
      static_cast<int>(kFold > 1 ? ceil_div(kExtent * kInner + (kAligned ? 0 : kWidth - 1), kPacks* kWidth)
                                 : ceil_div(kExtent, kPeriod) * kPeriod);
  static constexpr int kSpans = View::kColumns / kExtent;
  static constexpr int kLines = kGroups * kTurns;  // of a block
  // Blocks share out the lines of one span or, not folded, of all of them.
  static constexpr int kShared = kFold > 1 ? kSpan : kSpan * kSpans;
  static constexpr int kPartsOfShared = static_cast<int>(ceil_div(kShared, kLines));
  static constexpr int kParts = kFold > 1 ? kPartsOfShared * kSpans : kPartsOfShared;
  static constexpr int kTilesOfLine = static_cast<int>(ceil_div(kInner, kColumns));
  // Memory is written in whole packs: where lines begin anywhere, a tile has the columns that its last packs reach
  // into.
  static constexpr int kReached = kAligned || kFold > 1 ? 0 : kWidth - 1;
  static constexpr int kRows = kArrays * kColumns + kReached;  // of the view, in a tile
  static constexpr int kTeam = kPacks * kGroups;               // threads that have an array
  // A thread's elements: one state each, or one for all that are of one row, if its pack is a folded line.
  static constexpr bool kInPack = kFold > 1 && kAligned&& kPacks == 1;
  static constexpr int kStates = kInPack ? static_cast<int>(kInner) : kWidth;
  // Columns of the folded line that are of one row, in different states.
  static constexpr int kCopies = kInPack ? 1 : kFold;
  // Lanes of a warp that have the same columns add up their states by shuffles.
  static constexpr bool power_of_2(int n) { return (n & (n - 1)) == 0; }
  static constexpr bool kShuffles = kPeriod == 1 && kGroups > 1 && kPacks < 32 && power_of_2(kPacks) &&
                                    power_of_2(kGroups);
  static constexpr int kTogether = !kShuffles ? 1 : kTeam < 32 ? kGroups : 32 / kPacks;
  static constexpr int kEntries = kGroups / kTogether;  // of each array, each of kSlots states
  static constexpr int kSlots = kPacks * kStates;
  static constexpr int kOfThreads = kEntries * kArrays * kSlots,
                       kOfBlocks = kParts > 1 && Plan::kHeld ? kParts * kRows : 0;
  static constexpr int kRoom =
      kOfThreads > kOfBlocks ? kOfThreads : kOfBlocks;           // of states, before those of whole rows
  static constexpr bool kAlone = kEntries == 1 && kCopies == 1;  // no other thread has a part of these rows

  const Mem& mem;
  Pack* const shared;
  State<C>* const states;  // of threads, kRoom of them; then those of whole rows
  const int array, group, pack;
  const int64_t outer;   // the array, as the index of the outer kept dimensions
  const int64_t column;  // the tile's first
  const int columns;     // from there to the end of the line, or as many as the tile has
  const int span, first_line;
  const bool exists;  // whether there is such an array
  Place base;         // where the first column lies in the span's first line, or all of them
  int shift;          // how far the thread's lines, or the run, begin beyond a pack
  C pivot[kStates], sum[kStates];

  __device__ __forceinline__ TilePart(const Mem& mem, Pack* shared, int64_t tile, int part)
      : mem(mem),
        shared(shared),
        states(states_in(shared)),
        array(threadIdx.x / kTeam),
        group(threadIdx.x % kTeam / kPacks),
        pack(threadIdx.x % kPacks),
        outer(tile / kTilesOfLine * kArrays + (kArrays > 1 ? array : 0)),
        column(tile % kTilesOfLine * kColumns),
        columns(static_cast<int>(min(static_cast<int64_t>(kColumns + kReached), kInner - column))),
        span(part / kPartsOfShared),
        first_line(part % kPartsOfShared * kLines),
        exists(array < kArrays && (kArrays == 1 || outer < mem.operands.rows / kInner)) {
    base = first_of(outer, column);
    if constexpr (kFold > 1) base = moved_along<Reduced, Reduced::kSize - 1>(base, static_cast<unsigned>(span));
    shift = shift_of(group);
  }
  static __device__ __forceinline__ State<C>* states_in(Pack* shared) {
    return reinterpret_cast<State<C>*>(shared + (Plan::kHeld ? kTurns * kInputs * kThreads : 0));
  }
  // Where a column of an array begins.
  static __device__ __forceinline__ Place first_of(int64_t outer, int64_t column) {
    return moved_inside<View::kOuterKept, Kept::kSize>(
        moved_along<Kept, View::kOuterKept>(Place{}, static_cast<RowIndex>(outer)), static_cast<RowIndex>(column));
  }
  // As moved_along, by the dimensions [from, to).
  template <int from, int to>
  static __device__ __forceinline__ Place moved_inside(Place at, RowIndex index) {
    if constexpr (from >= to) {
      return at;
    } else {
      constexpr Dim dim = Kept::kDim[to - 1];
      if constexpr (from == to - 1) {
        return at.along(dim, index);
      } else {
        const RowIndex next = index / static_cast<RowIndex>(dim.extent);
        return moved_inside<from, to - 1>(at.along(dim, index - next * static_cast<RowIndex>(dim.extent)), next);
      }
    }
  }
  // How far the lines of a group begin beyond a pack.
  __device__ __forceinline__ int shift_of(int group) const {
    if constexpr (kAligned) return 0;
    const int begin = static_cast<int>(base.element);
    return (kFold > 1 ? begin : begin + group * static_cast<int>(kAlong.stride)) & (kWidth - 1);
  }

  // ---- the thread's packs

  __device__ __forceinline__ Pack* held(int turn, int k) const {
    return shared + (turn * kInputs + k) * kThreads + threadIdx.x;
  }
  // The first element of the thread's pack of a line, and which of its elements are in the tile's columns, or are
  // stored: none if the line is not there.
  struct At {
    Place line;
    int64_t element;
    int index;  // not folded: of the innermost reduced dimension; folded: of the pack's first element in the run
    unsigned inside, stored;
  };
  __device__ __forceinline__ At at(int turn) const {
    const int i = first_line + group + turn * kGroups;
    At at;
    if constexpr (kFold > 1) {
      at.line = base;
      at.index = (i * kPacks + pack) * kWidth - shift;
      at.element = base.element + at.index;
      constexpr int kRun = kExtent * static_cast<int>(kInner);
      if constexpr (kAligned && Mem::kPacks) {
        at.inside = at.index < kRun ? Mem::kAll : 0;
      } else {
        const bool whole = at.index >= 0 && at.index <= kRun - kWidth;
        at.inside = whole ? Mem::kAll : i < kSpan ? bits_within<In>(at.index, kRun) : 0;
      }
    } else {
      const int over = kSpans == 1 ? 0 : static_cast<unsigned>(i) / static_cast<unsigned>(kSpan);
      const Place begin =
          kSpans == 1 ? base : moved_along<Reduced, Reduced::kSize - 1>(base, static_cast<unsigned>(over));
      at.index = i - over * kSpan;
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
      at.inside = at.index < kExtent && over < kSpans ? bits_within<In>(pack * kWidth - shift, columns) : 0;
    }
    if (!exists) at.inside = 0;
    at.stored = at.inside;
    if constexpr (kReached > 0) {
      // What another tile's columns reach into is its own to store.
      const int first = pack * kWidth - shift;
      if (first >= kColumns || (first < 0 && column > 0)) at.stored = 0;
    }
    return at;
  }
  // Where an element of a pack lies in the side operands.
  __device__ __forceinline__ Place place(const At& at, int e) const {
    if constexpr (kFold > 1) {
      const unsigned index = at.index + e, line = index / static_cast<unsigned>(kInner);
      Place first = first_of(outer, index - line * static_cast<unsigned>(kInner));
      first = moved_along<Reduced, Reduced::kSize - 1>(first, static_cast<unsigned>(span));
      return first.along(kAlong, line);
    } else {
      Place line = at.line;
      const Place begin = first_of(0, column), here = first_of(0, column + pack * kWidth - shift + e);
      line.element += here.element - begin.element;
#pragma unroll
      for (int s = 0; s < Mem::kSides; ++s) line.side[s] += here.side[s] - begin.side[s];
      return line;
    }
  }
  // Of a pack's elements those that are the tile's and not masked.
  __device__ __forceinline__ unsigned kept(const At& at) const {
    if constexpr (!Mem::kMasked) return at.inside;
    unsigned kept = 0;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if ((at.inside >> e) & 1) kept |= static_cast<unsigned>(mem.is_kept(place(at, e))) << e;
    }
    return kept;
  }

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
  // Waits for the copies, and puts pads in the place of elements that no column may have: each thread reads only what
  // it has copied itself, so that there is no need for a barrier.
  __device__ __forceinline__ void finish_copy() const {
    wait_for_copies();
    if constexpr (((kFold > 1 && !kAligned) || Mem::kMasked) && Mem::kOrdered) {
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
    if constexpr (((kFold > 1 && !kAligned) || Mem::kMasked) && Mem::kOrdered) {
      const unsigned bits = kept(at);
      if (bits != Mem::kAll && at.inside) Mem::mend(raw, bits);
    }
  }
  __device__ __forceinline__ void values(typename Mem::Values& v, int turn) const {
    Pack raw[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) raw[k] = *held(turn, k);
    values_of(v, raw, turn);
  }
  __device__ __forceinline__ void values_of(typename Mem::Values& v, const Pack (&raw)[kInputs], int turn) const {
    if constexpr (Mem::kOrdered) {
      mem.values(v, raw, Place{}, kAlong, Mem::kAll);
    } else {
      const At at = this->at(turn);
      const unsigned bits = turn < kTurns ? kept(at) : 0;
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        C w[kWidth];
        Elements<In>::widen(w, raw[k]);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) v[e][k] = w[e];
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if ((bits >> e) & 1) {
          mem.fuse(v[e], place(at, e));
        } else {
#pragma unroll
          for (int k = 0; k < kInputs; ++k) v[e][k] = Op::pad(k);
        }
      }
    }
  }

  // ---- states

  // The states of the thread's columns, or of those of its warp's lanes that have the same.
  __device__ __forceinline__ void sum_lines() {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      pivot[s] = M::constant(Op::kHasPivot ? -M::kInfinity : 0);
      sum[s] = M::constant(0);
    }
    if constexpr (Op::kHasPivot) {
      C largest[kWidth];
      if constexpr (Mem::kOrdered) {
        Pack raw = *held(0, 0);
#pragma unroll 8
        for (int t = 1; t < kTurns; ++t) raw = Elements<In>::max(raw, *held(t, 0));
        Elements<In>::widen(largest, raw);
      } else {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) largest[e] = -M::kInfinity;
        for (int t = 0; t < kTurns; ++t) {
          typename Mem::Values v;
          values(v, t);
#pragma unroll
          for (int e = 0; e < kWidth; ++e) largest[e] = M::max(largest[e], v[e][0]);
        }
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) pivot[e % kStates] = M::max(pivot[e % kStates], largest[e]);
      over_lanes([&](int offset) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) pivot[s] = M::max(pivot[s], __shfl_xor_sync(kFullWarp, pivot[s], offset));
      });
    }
    Relative<M> relative[kStates];
#pragma unroll
    for (int s = 0; s < kStates; ++s) relative[s] = Relative<M>(pivot[s]);
#pragma unroll 4
    for (int t = 0; t < kTurns; ++t) {
      typename Mem::Values v;
      C terms[kWidth];
      values(v, t);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e % kStates] += terms[e] = Op::term(relative[e % kStates], v[e]);
      if constexpr (kTermsFit) *held(t, 0) = Elements<In>::narrow(terms);
    }
    over_lanes([&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum[s] += __shfl_xor_sync(kFullWarp, sum[s], offset);
    });
  }
  // The same of lines that are not held, some of which are read together.
  __device__ __forceinline__ void sum_lines_read() {
    constexpr int kTogether = (kWidth > 8 ? 4 : 8) / (kInputs - Op::kFirstSummed);  // as there are registers
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      pivot[s] = M::constant(Op::kHasPivot ? -M::kInfinity : 0);
      sum[s] = M::constant(0);
    }
#pragma unroll 1
    for (int t = 0; t < kTurns; t += kTogether) {
      Pack raw[kTogether][kInputs];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) read<Op::kFirstSummed>(raw[u], t + u);
      if constexpr (Op::kHasPivot) {
        C largest[kWidth];
        if constexpr (Mem::kOrdered) {
          Pack packs = raw[0][0];
#pragma unroll
          for (int u = 1; u < kTogether; ++u) packs = Elements<In>::max(packs, raw[u][0]);
          Elements<In>::widen(largest, packs);
        } else {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) largest[e] = -M::kInfinity;
#pragma unroll
          for (int u = 0; u < kTogether; ++u) {
            typename Mem::Values v;
            values_of(v, raw[u], t + u);
#pragma unroll
            for (int e = 0; e < kWidth; ++e) largest[e] = M::max(largest[e], v[e][0]);
          }
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          C next = pivot[s];
#pragma unroll
          for (int e = s; e < kWidth; e += kStates) next = M::max(next, largest[e]);
          sum[s] *= Relative<M>(next).rescale(pivot[s]);
          pivot[s] = next;
        }
      }
      Relative<M> relative[kStates];
#pragma unroll
      for (int s = 0; s < kStates; ++s) relative[s] = Relative<M>(pivot[s]);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        typename Mem::Values v;
        values_of(v, raw[u], t + u);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum[e % kStates] += Op::term(relative[e % kStates], v[e]);
      }
    }
    over_lanes([&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const State<C> other{__shfl_xor_sync(kFullWarp, pivot[s], offset), __shfl_xor_sync(kFullWarp, sum[s], offset)};
        const State<C> both = jax_softmax::combine<Op, M>({pivot[s], sum[s]}, other);
        pivot[s] = both.pivot;
        sum[s] = both.sum;
      }
    });
  }
  // Over lanes that have the same columns: combine(how far apart they are).
  template <class Combine>
  static __device__ __forceinline__ void over_lanes(Combine combine) {
#pragma unroll
    for (int offset = kPacks * kTogether / 2; offset >= kPacks && kTogether > 1; offset /= 2) combine(offset);
  }

  // ---- the states of the tile's rows

  // Calls use(s, row) for the row that each of the thread's states is of.
  template <class Use>
  __device__ __forceinline__ void for_rows_of_thread(Use use) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kFold > 1) {
        use(s, min(array, kArrays - 1) * kColumns + (pack * kWidth + s + kPacks * kWidth - shift) % kColumns);
      } else {
        use(s, min(array, kArrays - 1) * kColumns + min(max(pack * kWidth - shift + s, 0), kColumns + kReached - 1));
      }
    }
  }
  // The state that an entry has of a row's copy-th column.
  __device__ __forceinline__ const State<C>& part_of(int row, int entry, int copy) const {
    const int of_array = kArrays == 1 ? 0 : row / kColumns, in_array = row - of_array * kColumns;
    int at = in_array + copy * kColumns;
    if constexpr (!kInPack) {
      if constexpr (kArrays == 1) {
        at += kFold > 1 ? shift : shift_of(entry);
      } else if constexpr (!kAligned) {
        // From where this thread's array begins; if there is no array but the first, that is where all threads' do.
        const int64_t arrays = View::kOuterKept == 0 ? 0 : of_array - array;
        const int64_t begin = base.element + arrays * kExtent * kInner;
        at += static_cast<int>(begin) & (kWidth - 1);
      }
      if (kFold > 1 && at >= kSlots) at -= kSlots;
      at = at % kWidth * kPacks + at / kWidth;
    }
    return states[(of_array * kEntries + entry) * kSlots + at];
  }

  static constexpr int kStatesOfRow = kEntries * kCopies;
  // As many lanes to a row as there are for all rows, if it has states for them.
  static constexpr int lanes_for(int lanes) {
    return lanes < 32 && 2 * lanes * kRows <= kThreads && 2 * lanes <= kStatesOfRow ? lanes_for(2 * lanes) : lanes;
  }
  static constexpr int kLanes = lanes_for(1);

  // Calls publish(row, state, lane, lanes) for each row, of the block's lines, in as many lanes of a warp.
  template <class Publish>
  __device__ __forceinline__ void combine(Publish publish) const {
    if (array < kArrays && group % kTogether == 0) {
      // Of neighbouring threads the same state in neighbouring places.
      State<C>* const to = states + (array * kEntries + group / kTogether) * kSlots + pack;
#pragma unroll
      for (int s = 0; s < kStates; ++s) to[s * kPacks] = {pivot[s], sum[s]};
    }
    __syncthreads();
    for_rows([&](int row, int lane, bool exists) {
      auto state = combine_all<Op>(lane, exists ? kStatesOfRow : 0, kLanes, [&](int i) {
        const int entry = i / kCopies;
        return part_of(row, entry, i - entry * kCopies);
      });
      state = combine_over_lanes<Op, kLanes>(state);
      if (exists) publish(row, state, lane, kLanes);
    });
  }
  // Calls body(row, lane, exists) in all lanes of teams that share out the rows; whole warps stay together.
  template <class Body>
  static __device__ __forceinline__ void for_rows(Body body) {
    for (int at = threadIdx.x; at / 32 * 32 < kRows * kLanes; at += kThreads) {
      const int row = at / kLanes;
      body(min(row, kRows - 1), at % kLanes, row < kRows);
    }
  }
  __device__ __forceinline__ State<C>& whole(int row) const { return whole_in(shared, row); }
  static __device__ __forceinline__ State<C>& whole_in(Pack* shared, int row) { return states_in(shared)[kRoom + row]; }

  // ---- results

  // Writes the results, given the states of whole rows or, where the block has whole rows and the thread is alone with
  // its own, without.
  template <bool kGiven>
  __device__ __forceinline__ void finish() const {
    typename Op::Row finished[kStates];
    typename Op::Scale scale[kStates];
    const auto prepare = [&](int s, const State<C>& state) {
      if constexpr (kTermsFit) {
        scale[s] = Op::term_scale(state, pivot[s]);
      } else {
        finished[s] = Op::row(state);
      }
    };
    if constexpr (kGiven) {
      for_rows_of_thread([&](int s, int row) { prepare(s, whole(row)); });
    } else {
#pragma unroll
      for (int s = 0; s < kStates; ++s) prepare(s, {pivot[s], sum[s]});
    }
    const auto store = [&](const At& at, C(&result)[kWidth]) {
      if (at.stored) Mem::store(mem.out() + at.element, Mem::results(result, kept(at)), at.stored);
    };
    const auto results_of = [&](C(&result)[kWidth], const typename Mem::Values& v) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) result[e] = Op::finish(finished[e % kStates], v[e]);
    };
    if constexpr (Plan::kHeld) {
#pragma unroll 4
      for (int t = 0; t < kTurns; ++t) {
        C result[kWidth];
        if constexpr (kTermsFit) {
          Elements<In>::widen(result, *held(t, 0));
#pragma unroll
          for (int e = 0; e < kWidth; ++e) result[e] = result[e] * scale[e % kStates];
        } else {
          typename Mem::Values v;
          values(v, t);
          results_of(result, v);
        }
        store(at(t), result);
      }
    } else {
      Pack raw[kTurns][kInputs];
#pragma unroll
      for (int t = 0; t < kTurns; ++t) read<0>(raw[t], t);
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
        typename Mem::Values v;
        C result[kWidth];
        values_of(v, raw[t], t);
        results_of(result, v);
        store(at(t), result);
      }
    }
  }
};

template <class Mem, class View, class Plan>
__device__ __forceinline__ void tile(const Operands& operands) {
  using Part = TilePart<Mem, View, Plan>;
  using Op = typename Mem::Op;
  using C = typename Mem::C;
  constexpr int kCluster = Part::kParts, kRows = Part::kRows;  // blocks that share a tile
  extern __shared__ __align__(128) Pack shared[];
  const Mem mem{operands};
  const int64_t index = blockIdx.x / kCluster;
  const int rank = static_cast<int>(blockIdx.x - index * kCluster);
  Part part(mem, shared, index, rank);
  part.copy();
  part.finish_copy();
  part.sum_lines();
  constexpr bool kAlone = kCluster == 1 && Part::kAlone;
  if constexpr (!kAlone) {
    part.combine([&](int row, const State<C>& state, int lane, int) {
      if (lane == 0) part.whole(row) = state;
    });
    __syncthreads();
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    // Every block tells all others, in the place of states that have been put together.
    __shared__ uint64_t received;
    const WordsInCluster<C> exchange{reinterpret_cast<uint64_t*>(part.states), &received};
    begin_exchange(&received, kCluster * kRows * static_cast<int>(sizeof(State<C>)));
    wait_until_all_have_begun();
    for (int i = threadIdx.x; i < kRows * kCluster; i += Plan::kThreads) {
      const int block = i / kRows, row = i - block * kRows;
      exchange.publish(rank * kRows + row, part.whole(row), block);
    }
    wait_for_cluster(&received, 0);
    __syncthreads();  // the block's own states have been read
    for (int row = threadIdx.x; row < kRows; row += Plan::kThreads) {
      part.whole(row) = combine_all<Op>(0, kCluster, 1, [&](int block) { return exchange.state(block * kRows + row); });
    }
    __syncthreads();
  }
#endif
  part.template finish<!kAlone>();
}

}  // namespace jax_softmax::device
