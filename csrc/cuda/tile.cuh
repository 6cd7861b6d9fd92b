// The schedule for rows that are not runs of memory: a block, or the blocks of a cluster, hold neighbouring rows in
// shared memory, read once and written once.
//
// Memory is seen as lines, runs of neighbouring elements one for each index of the reduced dimensions outside of it,
// and a tile is some packs of each line. Whatever the view, a thread's packs lie in lines so far apart that the same
// element of each belongs to the same row. So a thread keeps a state for each position in a pack (or one, if a pack
// belongs to one row), and needs no other index while it goes down the lines.
#pragma once

#include "cuda/chunk.cuh"
#include "cuda/divisor.cuh"

namespace jax_softmax::cuda {

// Dimensions whose indices are counted by one number below 2^31.
struct Strided {
  int size;
  Divisor extent[kMaxDims];
  int64_t stride[kMaxDims];
  int64_t mask_stride[kMaxDims];

  Strided() = default;
  explicit Strided(const Dims& dims) : size(dims.size) {
    for (int i = 0; i < size; ++i) {
      extent[i] = Divisor(dims.dim[i].extent);
      stride[i] = dims.dim[i].stride;
      mask_stride[i] = dims.dim[i].mask_stride;
    }
  }
  // Where the index-th combination lies; *innermost becomes the index of the last dimension.
  __device__ __forceinline__ Offset at(unsigned index, unsigned* innermost) const {
    *innermost = index;
    if (size == 1) return {index * stride[0], index * mask_stride[0]};
    Offset offset{0, 0};
    for (int i = size - 1; i >= 0; --i) {
      const unsigned rest = i == 0 ? 0 : extent[i].divide(index);
      const unsigned here = index - rest * extent[i].divisor;
      if (i == size - 1) *innermost = here;
      offset.element += here * stride[i];
      offset.mask += here * mask_stride[i];
      index = rest;
    }
    return offset;
  }
};

// The state of `team` neighbouring lanes, a power of 2.
template <class Op, class M>
__device__ __forceinline__ State<typename M::Value> combine_over_team(State<typename M::Value> state, int team) {
  if constexpr (Op::kHasPivot) {
    auto pivot = state.pivot;
    for (int offset = team / 2; offset > 0; offset /= 2) {
      pivot = M::max(pivot, __shfl_xor_sync(kFullWarp, pivot, offset));
    }
    state.sum *= Relative<M>::rescale(state.pivot, pivot);
    state.pivot = pivot;
  }
  for (int offset = team / 2; offset > 0; offset /= 2) state.sum += __shfl_xor_sync(kFullWarp, state.sum, offset);
  return state;
}

// How a thread gets from one of its lines to the next, `step` lines on, without a division: for two dimensions or one.
struct Stride {
  bool known;                // false: by a division after all
  unsigned inner, extent;    // of the innermost dimension's index: added, and when it carries
  int64_t element, carried;  // added always, and with the carry
  int64_t mask, mask_carried;

  Stride() = default;
  Stride(const Dims& dims, int step) : known(dims.size <= 2) {
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
  Divisor cluster, packs, unit, segment_packs, inner, of_column;
};

// How a tile's lines lie in segments, see plan.h: some packs of several segments, a part of a segment, or runs.
enum class Lines { kSpanning, kPart, kRuns };

// The state of the entries begin, begin + step, ... below end, some of which are read together.
template <class Op, class M, class Entry>
__device__ __forceinline__ State<typename M::Value> combine_entries(int begin, int end, int step, Entry entry) {
  constexpr int kTogether = 4;
  auto state = identity<Op, M>();
  for (int i = begin; i < end; i += kTogether * step) {
    State<typename M::Value> part[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) part[u] = i + u * step < end ? entry(i + u * step) : identity<Op, M>();
    state = combine_parts<Op, M>(state, part);
  }
  return state;
}

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
    int number;
  };
  // A pack: where it begins, the position in the segment or run, and whether all of its elements are the tile's.
  struct Place {
    int64_t begin;
    int position;
    bool whole;
  };

  const TileArgs<A>& args;
  int group, place;  // which lines, and which of the tile's packs of them
  int segment;       // which of the tile's segments, if it has several
  int first;         // if alike: the position in the tile's part of a line that the thread's pack begins with
  int start;         // the position in the segment of that part
  unsigned bits;     // if a part of a segment: of the elements that are the tile's
  Offset base;       // of the first line or, if alike, of the pack in it
  int first_line;
  int lines;  // of the thread

  __device__ __forceinline__ TilePart(const TileArgs<A>& args, unsigned index, int rank) : args(args) {
    const Tile& tile = args.tile;
    group = args.packs.divide(threadIdx.x);
    place = threadIdx.x - group * tile.packs;
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
      base = segment_offset(at) + Offset{start, 0};
    } else if constexpr (kLines == Lines::kRuns) {
      segment = args.unit.divide(place);
      place -= segment * tile.unit;
      at = index * tile.segments + segment;
      active = active && at < tile.all_segments;
      base = segment_offset(at);
    } else {
      at = index / tile.segment_tiles;
      start = (index - at * tile.segment_tiles) * tile.width;
      base = segment_offset(at) + Offset{start, 0};
    }
    if constexpr (kAlike && !kWhole) {
      first = place * kWidth - shift_of(kLines == Lines::kRuns ? base.element : line(first_line).element);
      base.element += first;
      if (kLines == Lines::kPart) {
        bits = A::bits_within(first, min(static_cast<int64_t>(tile.width), tile.segment - start));
      }
    }
    const int end = min((rank + 1) * tile.block_lines, tile.all_lines);
    lines = active && bits && first_line < end ? (end - first_line - 1) / tile.groups + 1 : 0;
  }

  __device__ __forceinline__ Offset segment_offset(unsigned at) const {
    unsigned ignored;
    return args.kept.at(at, &ignored);
  }
  // How many elements beyond a whole pack something begins.
  static __device__ __forceinline__ int shift_of(int64_t element) { return static_cast<int>(element) & (kWidth - 1); }

  __device__ __forceinline__ Line line(int number) const {
    unsigned inner;
    const Offset offset = base + args.lines.at(number, &inner);
    return {offset.element, offset.mask, inner, number};
  }
  // How many elements beyond a whole pack the tile's part of a line begins, if alike.
  __device__ __forceinline__ int shift_of_line(int number) const { return shift_of(line(number).element - first); }
  __device__ __forceinline__ void advance(Line& line) const {
    const Stride& next = args.next;
    if (!next.known) {
      line = this->line(line.number + args.tile.groups);
      return;
    }
    line.inner += next.inner;
    line.element += next.element;
    if constexpr (A::kMasked) line.mask += next.mask;
    if (line.inner >= next.extent) {
      line.inner -= next.extent;
      line.element += next.carried;
      if constexpr (A::kMasked) line.mask += next.mask_carried;
    }
    line.number += args.tile.groups;
  }
  // Calls body(i, line) for the thread's lines.
  template <class Body>
  __device__ __forceinline__ void for_lines(Body body) const {
    if (lines == 0) return;
    Line at = line(first_line);
#pragma unroll 4
    for (int i = 0; i < lines; ++i, advance(at)) body(i, at);
  }
  // The same for all lanes of a warp together, as often as the one with most lines needs.
  template <class Body>
  __device__ __forceinline__ void for_lines_together(Body body) const {
    int most = lines;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(kFullWarp, most, offset));
    Line at = line(first_line);
    for (int i = 0; i < most; ++i, advance(at)) body(i, at);
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
  // The bits of a pack's elements that are the tile's.
  __device__ __forceinline__ unsigned own_bits(const Place& at) const {
    if constexpr (kLines == Lines::kRuns) return A::bits_within(at.position, args.tile.run);
    return bits;
  }

  // The bits of a pack's elements that are the tile's and not masked.
  __device__ __forceinline__ unsigned kept_bits(const Line& line, const Place& at) const {
    const unsigned own = own_bits(at);
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

  // Copies the thread's pack of a line, of operand k to held(k), with pads in the place of what is beyond a run.
  template <class Held>
  __device__ __forceinline__ void copy(const Line& line, Held held) const {
    const auto at = place_in(line);
    const bool readable = at.whole || (kLines == Lines::kPart && args.access.whole_in_memory({at.begin, 0}, 0));
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) {
      if (readable) {
        copy_pack(held(k), args.access.in[k] + at.begin);
      } else {
        const unsigned own = own_bits(at);
        *held(k) = select_elements<T>(own, load_elements(args.access.in[k] + at.begin, own), A::pad_pack(k));
      }
    }
  }

  // Puts pads in the place of what is masked.
  template <class Held>
  __device__ __forceinline__ void mend(const Line& line, Held held) const {
    const unsigned kept = kept_bits(line, place_in(line));
    if (kept == kAllBits<T>) return;
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) *held(k) = select_elements<T>(kept, *held(k), A::pad_pack(k));
  }

  // As `store`, by a whole warp together, some of whose lanes may have nothing to store: a pack at the edge of the tile
  // is stored by as many lanes as it has elements.
  __device__ __forceinline__ void store_together(bool valid, const Line& line, Pack result) const {
    constexpr int kAtOnce = 32 / kWidth;
    if constexpr (A::kMasked) {
      if (valid) result = A::with_masked(result, kept_bits(line, place_in(line)));
    }
    if (valid && bits == kAllBits<T>) store_pack(args.access.out + line.element, result);
    const int lane = threadIdx.x % 32, element = lane % kWidth;
    for (unsigned edges = __ballot_sync(kFullWarp, valid && bits != kAllBits<T>); edges;) {
      int source = -1;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, edges &= edges - 1) {
        if (lane / kWidth == i) source = __ffs(edges) - 1;
      }
      Pack pack;
#pragma unroll
      for (int w = 0; w < 4; ++w) pack.word[w] = __shfl_sync(kFullWarp, result.word[w], source & 31);
      const int64_t begin = __shfl_sync(kFullWarp, line.element, source & 31);
      const unsigned own = __shfl_sync(kFullWarp, bits, source & 31);
      if (source >= 0 && (own >> element) & 1) store_element(args.access.out + begin, pack, element);
    }
  }

  __device__ __forceinline__ void store(const Line& line, Pack result) const {
    const auto at = place_in(line);
    if constexpr (A::kMasked) result = A::with_masked(result, kept_bits(line, at));
    if (at.whole) {
      store_pack(args.access.out + at.begin, result);
    } else {
      store_elements(args.access.out + at.begin, result, own_bits(at));
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
  static constexpr int kStates = kSeparate ? kWidth : 1;
  static constexpr bool kWhole = kLines == Lines::kSpanning;

  C pivot[kStates];
  C sum[kStates];

  // Over lanes that share rows: combine(how far apart they are).
  template <class Combine>
  static __device__ __forceinline__ void over_lanes(const Tile& tile, Combine combine) {
    if constexpr (kSeparate) {
      if constexpr (kWhole) {
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

  // Calls publish(column, state, lane, lanes) for each of the tile's columns in as many lanes of a warp, by way of
  // `entries`.
  template <class Publish>
  __device__ __forceinline__ void combine(const TilePart<A, kSeparate, kLines>& part, unsigned index, int rank,
                                          State<C>* entries, Publish publish) const {
    const TileArgs<A>& args = part.args;
    const Tile& tile = args.tile;
    const int inner = static_cast<int>(tile.inner), in_tile = part.segment * tile.unit + part.place;
    if constexpr (kSeparate) {
      const bool shuffled = kWhole && tile.shuffled;
      const bool writes = shuffled ? threadIdx.x % 32 < tile.packs : part.group < tile.groups;
      // The first elements of all packs side by side, then the second ones, so that lanes write side by side.
      State<C>* const to = entries + (shuffled ? threadIdx.x / 32 : part.group) * tile.entries + in_tile;
      if (writes) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) to[s * tile.packs] = {pivot[s], sum[s]};
      }
    } else if (part.group < tile.groups && in_tile % tile.shuffled == 0) {
      entries[part.group * tile.entries + in_tile / tile.shuffled] = {pivot[0], sum[0]};
    }
    __syncthreads();
    // A team of lanes adds up each column.
    const int of_column = args.of_column.divisor, parts = of_column * tile.entry_rows, team = tile.team;
    for (int begin = 0; begin < tile.columns * team; begin += blockDim.x) {
      const int column = (begin + static_cast<int>(threadIdx.x)) / team, lane = threadIdx.x % team;
      // Where the column's first position is in each of the rows of entries, and how far it is to its next.
      int from = column * of_column;
      if constexpr (kLines == Lines::kRuns) {
        const int segment = args.inner.divide(column), in_segment = column - segment * inner;
        const int shift = kSeparate ? part.shift_of(part.segment_offset(index * tile.segments + segment).element) : 0;
        from = segment * of_column * inner + (in_segment + shift) % inner;
      }
      const int apart = kLines == Lines::kRuns ? inner : 1;
      State<C> state = combine_entries<Op, M>(lane, column < tile.columns ? parts : 0, team, [&](int i) {
        const int row = args.of_column.divide(i), position = i - row * of_column;
        // In a part of a segment, lines may begin anywhere in a pack; the positions count from where they begin.
        const int shift = kLines == Lines::kPart ? part.shift_of_line(rank * tile.block_lines + row) : 0;
        const int there = shift + from + position * apart;
        return entries[row * tile.entries + (kSeparate ? there % kWidth * tile.packs + there / kWidth : there)];
      });
      state = combine_over_team<Op, M>(state, team);
      if (column < tile.columns) publish(column, state, lane, team);
    }
  }

  // The columns that the thread's states belong to.
  static __device__ __forceinline__ void columns_of(const TilePart<A, kSeparate, kLines>& part,
                                                    int (&column)[kStates]) {
    const Tile& tile = part.args.tile;
    const int inner = static_cast<int>(tile.inner);
    if constexpr (kLines == Lines::kRuns) {
      int in_segment = kSeparate ? (part.first + inner * kWidth) % inner : 0;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        column[s] = min(part.segment, tile.segments - 1) * inner + in_segment;
        if (++in_segment == inner) in_segment = 0;
      }
    } else {
      const int first = kSeparate ? (kWhole ? part.place * kWidth : part.first) : part.place / tile.shuffled;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const int position = kWhole ? first + s : min(max(first + s, 0), tile.positions - 1);
        column[s] = part.args.of_column.divide(position);
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
  extern __shared__ Pack shared[];
  const A& access = args.access;
  const Tile& tile = args.tile;
  const int threads = blockDim.x;
  const unsigned index = args.cluster.divide(blockIdx.x);
  const int rank = blockIdx.x - index * tile.cluster;
  const bool clustered = tile.cluster > 1;
#if __CUDA_ARCH__ >= 900
  // Begins the barrier that says that all of the cluster's blocks run: only then can their memory be written to.
  if (clustered) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
  const TilePart<A, kSeparate, kLines> part(args, index, rank);

  // Each thread reads only what it has copied itself, so that there is no need for a barrier.
  Pack* const mine = shared + threadIdx.x;
  const auto at = [&](int i, int k) { return mine + (i * kInputs + k) * threads; };
  part.for_lines([&](int i, const auto& line) { part.copy(line, [&](int k) { return at(i, k); }); });
  wait_for_copies();
  if constexpr (A::kMasked) {
    part.for_lines([&](int i, const auto& line) { part.mend(line, [&](int k) { return at(i, k); }); });
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
    State<C>* const entries = reinterpret_cast<State<C>*>(shared + tile.held * kInputs * threads);
    State<C>* const of_blocks = entries + tile.entry_rows * tile.entries;
    Final* const finals = reinterpret_cast<Final*>(of_blocks + tile.cluster * tile.columns);
    // Ordered as the entries are, so that lanes read side by side.
    const int every = (tile.columns + kWidth - 1) / kWidth;
    const auto final_at = [&](int column) -> Final& { return finals[column % kWidth * every + column / kWidth]; };
#if __CUDA_ARCH__ >= 900
    if (clustered) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    states.combine(part, index, rank, entries, [&](int column, const State<C>& state, int lane, int team) {
      if (clustered) {
        const WordsInCluster<C> words{reinterpret_cast<uint64_t*>(of_blocks)};
        for (int block = lane; block < tile.cluster; block += team) {
          words.publish(rank * tile.columns + column, state, block);
        }
      } else if (lane == 0) {
        final_at(column) = final_of(state);
      }
    });
#if __CUDA_ARCH__ >= 900
    if (clustered) {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      const int team = tile.team;
      for (int begin = 0; begin < tile.columns * team; begin += threads) {
        const int column = (begin + static_cast<int>(threadIdx.x)) / team, lane = threadIdx.x % team;
        const State<C> state = combine_over_team<Op, M>(
            combine_entries<Op, M>(lane, column < tile.columns ? tile.cluster : 0, team,
                                   [&](int block) {
                                     const int entry = block * tile.columns + column;
                                     uint64_t words[kStateWords<C>];
#pragma unroll
                                     for (int w = 0; w < kStateWords<C>; ++w) {
                                       words[w] =
                                           reinterpret_cast<const uint64_t*>(of_blocks)[entry * kStateWords<C> + w];
                                     }
                                     return from_words(words);
                                   }),
            team);
        if (lane == 0 && column < tile.columns) final_at(column) = final_of(state);
      }
    }
#endif
    __syncthreads();
    int column[kStates];
    States::columns_of(part, column);
#pragma unroll
    for (int s = 0; s < kStates; ++s) final[s] = final_at(column[s]);
  }

  C scale[kStates];
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
      for (int e = 0; e < kWidth; ++e) terms[e] *= scale[kSeparate ? e : 0];
      return Elements<T>::narrow(terms);
    } else {
      return finish_separately<A>(final, raw);
    }
  };
  if constexpr (kLines == Lines::kPart) {
    part.for_lines_together([&](int i, const auto& line) {
      const bool valid = i < part.lines;
      Pack result{};
      if (valid) result = result_of(i);
      part.store_together(valid, line, result);
    });
  } else {
    part.for_lines([&](int i, const auto& line) { part.store(line, result_of(i)); });
  }
}

// Rows too long for that, read twice: a launch sums the pieces of tiles, another puts their states together, and the
// last one finishes them.
template <class A>
struct TilePassArgs {
  TileArgs<A> tile;
  State<typename A::C>* states;  // by tile, piece and column
  bool finish;
};

// The states of a row's pieces become one, in the place of the first: a warp to a row.
template <class Op, class M>
__global__ void __launch_bounds__(kTilePassThreads)
    combine_pieces(State<typename M::Value>* states, int pieces, int columns, int64_t rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kTilePassThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  State<typename M::Value>* const of_row = states + row / columns * pieces * columns + row % columns;
  const auto state = combine_over_lanes<Op, M, 32>(combine_entries<Op, M>(
      threadIdx.x % 32, pieces, 32, [&](int piece) { return of_row[static_cast<int64_t>(piece) * columns]; }));
  if (threadIdx.x % 32 == 0) *of_row = state;
}

template <class A, bool kSeparate, Lines kLines>
__global__ void __launch_bounds__(kTilePassThreads, sizeof(typename A::C) == 8 ? 2
                                                    : A::kMasked               ? 4
                                                                               : 6)
    tile_pass(const __grid_constant__ TilePassArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  using States = TileStates<A, kSeparate, kLines>;
  using Line = typename TilePart<A, kSeparate, kLines>::Line;
  constexpr int kWidth = A::kWidth, kInputs = A::kInputs, kStates = States::kStates;
  constexpr int kUnroll = kTilePassPacks / kInputs;
  extern __shared__ Pack shared[];
  State<C>* const entries = reinterpret_cast<State<C>*>(shared + kTilePassStages * kTilePassPacks * blockDim.x);
  const A& access = args.tile.access;
  const Tile& tile = args.tile.tile;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const unsigned pieces = tile.cluster;
  // What was read last, and may still be in the last cache, is finished first.
  const unsigned number = args.finish ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const unsigned index = args.tile.cluster.divide(number);
  const int piece = static_cast<int>(number - index * pieces);
  const TilePart<A, kSeparate, kLines> part(args.tile, index, piece);
  State<C>* const of_tile = args.states + static_cast<int64_t>(index) * pieces * tile.columns;

  // Calls use(n, held) for n lines at a time, at most kUnroll, while the copies of the next ones are in flight;
  // held(u, k) is the pack of the u-th of them. Each thread copies for itself, so that there is no need for a barrier.
  const auto for_packs = [&](auto use) {
    if (part.lines == 0) return;
    Line ahead = part.line(part.first_line);
    [[maybe_unused]] Line mended = ahead;
    int copied = 0;
    const auto held_in = [&](int batch, int u, int k) {
      return shared + ((batch % kTilePassStages * kUnroll + u) * kInputs + k) * blockDim.x + threadIdx.x;
    };
    const auto copy = [&](int batch) {
#pragma unroll 1
      for (int u = 0; u < kUnroll && copied < part.lines; ++u) {
        part.copy(ahead, [&](int k) { return held_in(batch, u, k); });
        part.advance(ahead);
        ++copied;
      }
      commit_copies();
    };
    for (int batch = 0; batch < kTilePassStages - 1; ++batch) copy(batch);
    for (int i = 0, batch = 0; i < part.lines; i += kUnroll, ++batch) {
      copy(batch + kTilePassStages - 1);
      wait_for_all_copies_but<kTilePassStages - 1>();
      const auto held = [&](int u, int k) { return held_in(batch, u, k); };
      const int n = min(kUnroll, part.lines - i);
      if constexpr (A::kMasked) {
        for (int u = 0; u < n; ++u, part.advance(mended)) part.mend(mended, [&](int k) { return held(u, k); });
      }
      use(n, held);
    }
  };

  if (!args.finish) {
    States states;
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const State<C> nothing = identity<Op, M>();
      states.pivot[s] = nothing.pivot;
      states.sum[s] = nothing.sum;
    }
    for_packs([&](int n, auto held) {
      Relative<M> relative[kStates];
      if constexpr (Op::kHasPivot) {
        Pack largest = *held(0, 0);
#pragma unroll 4
        for (int u = 1; u < n; ++u) largest = Elements<T>::max(largest, *held(u, 0));
        C pivot[kWidth];
        Elements<T>::widen(pivot, largest);
        if (!kSeparate) pivot[0] = A::max_element(largest);
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          pivot[s] = M::max(pivot[s], states.pivot[s]);
          states.sum[s] *= Relative<M>::rescale(states.pivot[s], pivot[s]);
          states.pivot[s] = pivot[s];
        }
      }
#pragma unroll
      for (int s = 0; s < kStates; ++s) relative[s] = Relative<M>(states.pivot[s]);
#pragma unroll 4
      for (int u = 0; u < n; ++u) {
        Pack raw[kInputs];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) raw[k] = *held(u, k);
        typename A::Values values;
        A::widen(values, raw);
        C terms[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) terms[e] = Op::term(relative[kSeparate ? e : 0], values[e]);
        states.add(terms);
      }
    });
    // Lanes that share rows bring their sums to one pivot.
    States::over_lanes(tile, [&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const State<C> other = {__shfl_xor_sync(kFullWarp, states.pivot[s], offset),
                                __shfl_xor_sync(kFullWarp, states.sum[s], offset)};
        const State<C> both = combine<Op, M>({states.pivot[s], states.sum[s]}, other);
        states.pivot[s] = both.pivot;
        states.sum[s] = both.sum;
      }
    });
    states.combine(part, index, piece, entries, [&](int column, const State<C>& state, int lane, int) {
      if (lane == 0) of_tile[piece * tile.columns + column] = state;
    });
    return;
  }

  typename Op::Row row[kStates];
  int column[kStates];
  States::columns_of(part, column);
#pragma unroll
  for (int s = 0; s < kStates; ++s) row[s] = Op::row(of_tile[column[s]]);
  Line line = part.line(part.first_line);
  for_packs([&](int n, auto held) {
#pragma unroll 2
    for (int u = 0; u < n; ++u) {
      Pack raw[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = *held(u, k);
      part.store(line, finish_separately<A>(row, raw));
      part.advance(line);
    }
  });
}

}  // namespace jax_softmax::cuda
