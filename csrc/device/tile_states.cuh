// The states of a tile's rows, and what becomes of them, the results. A thread sums its packs with `sum_held` or
// `sum_read`; where several threads have parts of a row, `combine` puts their states together; `finish` writes the
// results. What the words mean stands in tile.cuh.
#pragma once

#include "device/reduce.cuh"
#include "device/tile_part.cuh"

namespace jax_softmax::device {

template <class Mem, class Plan>
struct TileStates : TilePart<Mem, Plan> {
  using Part = TilePart<Mem, Plan>;
  using Op = typename Mem::Op;
  using M = typename Mem::M;
  using C = typename Mem::C;
  using In = typename Mem::In;
  using Values = typename Mem::Values;
  using Sum = typename Op::Sum;
  using Terms = typename Op::Terms;
  using State = StateOf<Op>;
  static constexpr TileGeometry kGeometry = Part::kGeometry;
  static constexpr bool kHeld = Plan::kPlan.in_shared;
  static constexpr bool kTermsFit = Mem::kTermsFit && kHeld;  // in the place of elements that are held
  static constexpr int kInputs = Mem::kInputs, kWidth = Mem::kWidth, kThreads = Part::kThreads;
  static constexpr int kArrays = Part::kArrays, kElements = Part::kElements, kFold = Part::kFold, kRows = Part::kRows;
  static constexpr int kPacks = Part::kPacks, kGroups = Part::kGroups, kTurns = Part::kTurns, kParts = Part::kParts;
  static constexpr bool kInPack = kGeometry.line_in_pack;
  static constexpr int kStates = kGeometry.states_of_thread, kCopies = kGeometry.states_of_line;
  static constexpr int kTogether = kGeometry.lines_summed;
  static constexpr int kEntries = kGeometry.sets, kSlots = kGeometry.states_of_set;
  static constexpr bool kAlone = kGeometry.alone;
  static constexpr int kRoom = kGeometry.states_before_rows;

  State* const states;  // in shared memory
  C pivot[kStates];
  Sum sum[kStates];

  __device__ __forceinline__ TileStates(const Mem& mem, Pack* shared, int64_t tile, int part)
      : Part(mem, shared, tile, part), states(reinterpret_cast<State*>(shared + kGeometry.packs_in_shared)) {}
  // The state of a whole row, where it has been put together.
  __device__ __forceinline__ State& whole(int row) const { return states[kRoom + row]; }

  // ---- of a thread

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      pivot[s] = M::constant(Op::kHasPivot ? -M::kInfinity : 0);
      sum[s] = Sum{};
    }
  }
  // The states of the thread's elements, added to those of its warp's lanes that have the same pack of other lines;
  // from lines that are held.
  __device__ __forceinline__ void sum_held() {
    clear();
    if constexpr (Op::kHasPivot) {
      C largest[kWidth];
      largest_held(largest);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) pivot[e % kStates] = M::max(pivot[e % kStates], largest[e]);
      over_lanes([&](int offset) {
#pragma unroll
        for (int s = 0; s < kStates; ++s) pivot[s] = M::max(pivot[s], __shfl_xor_sync(kFullWarp, pivot[s], offset));
      });
    }
    Terms terms_of[kStates];
    make_terms(terms_of);
#pragma unroll 4
    for (int t = 0; t < kTurns; ++t) {
      Values v;
      Sum terms[kWidth];
      this->values(v, t);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e % kStates] += terms[e] = Op::term(terms_of[e % kStates], v[e]);
      if constexpr (kTermsFit) *this->held(t, 0) = Elements<In>::narrow(terms);
    }
    over_lanes([&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) sum[s] += shuffled(sum[s], offset);
    });
  }
  // What the terms of each state are made with.
  __device__ __forceinline__ void make_terms(Terms (&terms)[kStates]) const {
    if constexpr (kIsSame<Terms, Relative<M>>) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) terms[s] = Relative<M>(pivot[s]);
    } else {
      for_rows_of_thread([&](int s, int row) { terms[s] = this->mem.terms(pivot[s], begin_of(row)); });
    }
  }
  // Of the thread's lines, the largest value in each place of a pack.
  __device__ __forceinline__ void largest_held(C (&largest)[kWidth]) const {
    if constexpr (Mem::kOrdered) {
      Pack raw = Mem::of_pivot(*this->held(0, 0));
#pragma unroll 8
      for (int t = 1; t < kTurns; ++t) raw = Mem::larger(raw, *this->held(t, 0));
      Elements<In>::widen(largest, raw);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) largest[e] = -M::kInfinity;
      for (int t = 0; t < kTurns; ++t) {
        Values v;
        this->values(v, t);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) largest[e] = M::max(largest[e], Op::of_pivot(v[e][0]));
      }
    }
  }

  // The same states from lines that are not held, some of which are read together.
  __device__ __forceinline__ void sum_read() {
    constexpr int kTogether = (Mem::kOrdered ? 8 : 4) / (kInputs - Mem::kFirstSummed);  // as there are registers
    clear();
#pragma unroll 1
    for (int t = 0; t < kTurns; t += kTogether) {
      Pack raw[kTogether][kInputs];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) this->template read<Mem::kFirstSummed>(raw[u], t + u);
      if constexpr (Op::kHasPivot) {
        C largest[kWidth];
        if constexpr (Mem::kOrdered) {
          Pack packs = Mem::of_pivot(raw[0][0]);
#pragma unroll
          for (int u = 1; u < kTogether; ++u) packs = Mem::larger(packs, raw[u][0]);
          Elements<In>::widen(largest, packs);
        } else {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) largest[e] = -M::kInfinity;
#pragma unroll
          for (int u = 0; u < kTogether; ++u) {
            Values v;
            this->values_of(v, raw[u], t + u);
#pragma unroll
            for (int e = 0; e < kWidth; ++e) largest[e] = M::max(largest[e], Op::of_pivot(v[e][0]));
          }
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          C next = pivot[s];
#pragma unroll
          for (int e = s; e < kWidth; e += kStates) next = M::max(next, largest[e]);
          sum[s] = moved(sum[s], Relative<M>(next), pivot[s]);
          pivot[s] = next;
        }
      }
      Terms terms[kStates];
      make_terms(terms);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        Values v;
        this->values_of(v, raw[u], t + u);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sum[e % kStates] += Op::term(terms[e % kStates], v[e]);
      }
    }
    combine_lanes();
  }
  // Puts together the states of those lanes, which have pivots of their own.
  __device__ __forceinline__ void combine_lanes() {
    over_lanes([&](int offset) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        const State other{__shfl_xor_sync(kFullWarp, pivot[s], offset), shuffled(sum[s], offset)};
        const State both = jax_softmax::combine<Op, M>({pivot[s], sum[s]}, other);
        pivot[s] = both.pivot;
        sum[s] = both.sum;
      }
    });
  }
  // Over lanes that have the same pack of different lines: combine(how far apart they are).
  template <class Combine>
  static __device__ __forceinline__ void over_lanes(Combine combine) {
#pragma unroll
    for (int offset = kPacks * kTogether / 2; offset >= kPacks && kTogether > 1; offset /= 2) combine(offset);
  }

  // ---- of the tile's rows

  // Calls use(s, row) for the row that each of the thread's states is of.
  template <class Use>
  __device__ __forceinline__ void for_rows_of_thread(Use use) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kFold > 1) {
        use(s, min(this->array, kArrays - 1) * kElements +
                   (this->pack * kWidth + s + kPacks * kWidth - this->shift) % kElements);
      } else {
        use(s, min(this->array, kArrays - 1) * kElements +
                   min(max(this->pack * kWidth - this->shift + s, 0), kElements + Part::kReached - 1));
      }
    }
  }
  // The state that an entry has of a row's copy-th element.
  __device__ __forceinline__ const State& part_of(int row, int entry, int copy) const {
    const int of_array = kArrays == 1 ? 0 : row / kElements, in_array = row - of_array * kElements;
    int at = in_array + copy * kElements;
    if constexpr (!kInPack) {
      if constexpr (kArrays == 1) {
        at += kFold > 1 ? this->shift : this->shift_of(entry);
      } else if constexpr (!Part::kAligned) {
        // From where this thread's array begins; if there is no array but the first, that is where all threads' do.
        const int64_t arrays = Mem::View::kView.outer_kept() == 0 ? 0 : of_array - this->array;
        const int64_t begin = this->base.element + arrays * Part::kExtent * Part::kInner;
        at += static_cast<int>(begin) & (kWidth - 1);
      }
      if (kFold > 1 && at >= kSlots) at -= kSlots;
      at = at % kWidth * kPacks + at / kWidth;
    }
    return states[(of_array * kEntries + entry) * kSlots + at];
  }

  static constexpr int kStatesOfRow = kGeometry.states_of_row, kLanes = kGeometry.lanes_of_row;

  // Calls publish(row, state) for each row, of the block's lines.
  template <class Publish>
  __device__ __forceinline__ void combine(Publish publish) const {
    if (this->array < kArrays && this->group % kTogether == 0) {
      // Of neighbouring threads the same state in neighbouring places.
      State* const to = states + (this->array * kEntries + this->group / kTogether) * kSlots + this->pack;
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
      if (exists && lane == 0) publish(row, state);
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

  // Where a row's first element lies; for what rows have of their own.
  __device__ __forceinline__ typename Mem::Place begin_of(int row) const {
    if constexpr (Op::kRowNumbers == 0 && !Op::kLabelled) return {};
    const int of_array = kArrays == 1 ? 0 : row / kElements;
    const int64_t last = mem_rows() / Part::kInner - 1, element = this->first_element + row - of_array * kElements;
    return this->in_first_line(min(first_array() + of_array, last), min(element, Part::kInner - 1));
  }
  // Stores the results that rows have themselves, given the states of whole rows.
  __device__ __forceinline__ void store_rows() const {
    if constexpr (Op::kRowResults > 0) {
      for (int row = threadIdx.x; row < kArrays * kElements; row += kThreads) {
        const int of_array = kArrays == 1 ? 0 : row / kElements;
        const int64_t element = this->first_element + row - of_array * kElements;
        const int64_t at = (first_array() + of_array) * Part::kInner + element;
        if (element < Part::kInner && at < mem_rows()) {
          this->mem.store_row(at, whole(row), this->mem.of_row(begin_of(row)));
        }
      }
    }
  }
  __device__ __forceinline__ int64_t mem_rows() const { return this->mem.operands.rows; }
  __device__ __forceinline__ int64_t first_array() const { return this->outer - (kArrays > 1 ? this->array : 0); }

  // ---- results

  // Writes the results, given the states of whole rows or, where the block has whole rows and the thread is alone with
  // its own, without.
  template <bool kGiven>
  __device__ __forceinline__ void finish() const {
    Finished finished[kStates];
    typename Mem::Addend addend[kStates] = {};
    finish_states<kGiven>(finished);
    if constexpr (Mem::kAddsAtLabel) {
      for_rows_of_thread([&](int s, int row) { addend[s] = this->mem.addend(begin_of(row)); });
    }
    if constexpr (kHeld) {
#pragma unroll 4
      for (int t = 0; t < kTurns; ++t) {
        C result[kWidth];
        if constexpr (kTermsFit) {
          Elements<In>::widen(result, *this->held(t, 0));
#pragma unroll
          for (int e = 0; e < kWidth; ++e) result[e] = result[e] * finished[e % kStates];
        } else {
          Values v;
          this->values(v, t);
          results_of(result, v, finished);
        }
        store(t, result, addend);
      }
    } else {
      Pack raw[kTurns][kInputs];
#pragma unroll
      for (int t = 0; t < kTurns; ++t) this->template read<0>(raw[t], t);
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
        Values v;
        C result[kWidth];
        this->values_of(v, raw[t], t);
        results_of(result, v, finished);
        store(t, result, addend);
      }
    }
  }

 private:
  // What makes results of a row's terms, or of its elements.
  using Finished = typename Conditional<kTermsFit, typename Op::Scale, typename Op::Row>::type;

  template <bool kGiven>
  __device__ __forceinline__ void finish_states(Finished (&finished)[kStates]) const {
    const auto prepare = [&](int s, const State& state, const typename Mem::Place& begin) {
      if constexpr (kTermsFit) {
        finished[s] = this->mem.term_scale(state, pivot[s], begin);
      } else {
        finished[s] = this->mem.row(state, begin);
      }
    };
    if constexpr (kGiven) {
      for_rows_of_thread([&](int s, int row) { prepare(s, whole(row), begin_of(row)); });
    } else {
#pragma unroll
      for (int s = 0; s < kStates; ++s) prepare(s, {pivot[s], sum[s]}, {});
    }
  }
  static __device__ __forceinline__ void results_of(C (&result)[kWidth], const Values& v,
                                                    const Finished (&finished)[kStates]) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result[e] = Op::finish(finished[e % kStates], v[e]);
  }
  __device__ __forceinline__ void store(int turn, C (&result)[kWidth],
                                        const typename Mem::Addend (&addend)[kStates]) const {
    const auto at = this->at(turn);
    if (!at.stored) return;
    const bool counts = Mem::complete(
        result, this->kept(at), [&](int e) { return addend[e % kStates]; }, [&](int e) { return this->column(at, e); });
    this->mem.store(this->mem.out() + at.element, at.element, result, counts, typename Part::Reader{*this, at},
                    at.stored);
  }
};

}  // namespace jax_softmax::device
