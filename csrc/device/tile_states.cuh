// The states of a tile's rows, and their results. `sum_held` and `sum_read` sum a thread's packs, in shared memory and
// in device memory; `combine` combines the states of threads with parts of the same row; `finish` writes the results.
// geometry/tile.h explains the words.
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
  using Part::kGeometry, Part::kInputs, Part::kWidth, Part::kThreads, Part::kMatrices, Part::kElements, Part::kFold;
  using Part::kRows, Part::kPacks, Part::kTeams, Part::kLinesOfThread, Part::kReach, Part::kInner;
  using Part::mem, Part::matrix, Part::team, Part::pack, Part::shift, Part::outer, Part::first_element;
  static constexpr bool kInShared = Plan::kPlan.in_shared;
  static constexpr bool kTermsFit = Mem::kTermsFit && kInShared;  // terms replace elements in shared memory
  static constexpr bool kInPack = kGeometry.line_in_pack;
  static constexpr int kStates = kGeometry.states_of_thread, kStatesOfLine = kGeometry.states_of_line;
  static constexpr int kLinesSummed = kGeometry.lines_summed;
  static constexpr int kSets = kGeometry.sets, kStatesOfSet = kGeometry.states_of_set;
  static constexpr bool kPrivate = kGeometry.private_states;
  static constexpr int kStatesBeforeRows = kGeometry.states_before_rows;

  State* const states;  // in shared memory
  C pivot[kStates];
  Sum sum[kStates];

  __device__ __forceinline__ TileStates(const Mem& mem, Pack* shared, int64_t tile, int part)
      : Part(mem, shared, tile, part), states(reinterpret_cast<State*>(shared + kGeometry.packs_in_shared)) {}
  // The state of a whole row, once it has been combined.
  __device__ __forceinline__ State& whole(int row) const { return states[kStatesBeforeRows + row]; }

  // ---- of a thread

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      pivot[s] = M::constant(Op::kHasPivot ? -M::kInfinity : 0);
      sum[s] = Sum{};
    }
  }
  // Sums the thread's packs in shared memory, and combines its states with those of the lanes of its warp that have the
  // same pack of other lines.
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
    for (int t = 0; t < kLinesOfThread; ++t) {
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
  // What Op::term takes, for each of the thread's states.
  __device__ __forceinline__ void make_terms(Terms (&terms)[kStates]) const {
    if constexpr (kIsSame<Terms, Relative<M>>) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) terms[s] = Relative<M>(pivot[s]);
    } else {
      for_rows_of_thread([&](int s, int row) { terms[s] = mem.terms(pivot[s], begin_of(row)); });
    }
  }
  // The maximum over the thread's lines, for each element of a pack.
  __device__ __forceinline__ void largest_held(C (&largest)[kWidth]) const {
    if constexpr (Mem::kIdentityLoad) {
      Pack raw = Mem::pivot_candidate(*this->held(0, 0));
#pragma unroll 8
      for (int t = 1; t < kLinesOfThread; ++t) raw = Mem::larger(raw, *this->held(t, 0));
      Elements<In>::widen(largest, raw);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) largest[e] = -M::kInfinity;
      for (int t = 0; t < kLinesOfThread; ++t) {
        Values v;
        this->values(v, t);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) largest[e] = M::max(largest[e], Op::pivot_candidate(v[e][0]));
      }
    }
  }

  // The same as sum_held, from device memory, with the loads of kTogether packs in flight at a time. Pivots are running
  // maxima: where one grows, the sum is rescaled.
  __device__ __forceinline__ void sum_read() {
    constexpr int kTogether = (Mem::kIdentityLoad ? 8 : 4) / (kInputs - Mem::kFirstSummed);  // that registers hold
    clear();
#pragma unroll 1
    for (int t = 0; t < kLinesOfThread; t += kTogether) {
      Pack raw[kTogether][kInputs];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) this->template read<Mem::kFirstSummed>(raw[u], t + u);
      if constexpr (Op::kHasPivot) {
        C largest[kWidth];
        if constexpr (Mem::kIdentityLoad) {
          Pack packs = Mem::pivot_candidate(raw[0][0]);
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
            for (int e = 0; e < kWidth; ++e) largest[e] = M::max(largest[e], Op::pivot_candidate(v[e][0]));
          }
        }
#pragma unroll
        for (int s = 0; s < kStates; ++s) {
          C next = pivot[s];
#pragma unroll
          for (int e = s; e < kWidth; e += kStates) next = M::max(next, largest[e]);
          sum[s] = rescaled(sum[s], Relative<M>(next), pivot[s]);
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
  // Combines the thread's states with those lanes', whose running maxima differ.
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
  // Calls combine(offset) for each step of a butterfly over the lanes that have the same pack of different lines.
  template <class Combine>
  static __device__ __forceinline__ void over_lanes(Combine combine) {
#pragma unroll
    for (int offset = kPacks * kLinesSummed / 2; offset >= kPacks && kLinesSummed > 1; offset /= 2) combine(offset);
  }

  // ---- of the tile's rows

  // Calls body(s, row) for each of the thread's states, with the number of its row in the tile.
  template <class Body>
  __device__ __forceinline__ void for_rows_of_thread(Body body) const {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if constexpr (kFold > 1) {
        body(s, min(matrix, kMatrices - 1) * kElements + (pack * kWidth + s + kPacks * kWidth - shift) % kElements);
      } else {
        body(s,
             min(matrix, kMatrices - 1) * kElements + min(max(pack * kWidth - shift + s, 0), kElements + kReach - 1));
      }
    }
  }
  // A set's state of a row; of_line: which one, if a folded line has several for the row.
  __device__ __forceinline__ const State& state_of_set(int row, int set, int of_line) const {
    const int of_matrix = kMatrices == 1 ? 0 : row / kElements, in_matrix = row - of_matrix * kElements;
    int at = in_matrix + of_line * kElements;
    if constexpr (!kInPack) {
      if constexpr (kMatrices == 1) {
        at += kFold > 1 ? shift : this->shift_of(set);
      } else if constexpr (!Part::kAligned) {
        // The shift of the row's matrix. Without outer batch dimensions there is one matrix.
        const int64_t matrices = Mem::View::kView.outer_batch() == 0 ? 0 : of_matrix - matrix;
        const int64_t begin = this->base.element + matrices * Part::kExtent * kInner;
        at += static_cast<int>(begin) & (kWidth - 1);
      }
      if (kFold > 1 && at >= kStatesOfSet) at -= kStatesOfSet;
      at = at % kWidth * kPacks + at / kWidth;
    }
    return states[(of_matrix * kSets + set) * kStatesOfSet + at];
  }

  static constexpr int kStatesOfRow = kGeometry.states_of_row, kLanes = kGeometry.lanes_of_row;

  // Calls publish(row, state) for each row, with the state of all lines of the block.
  template <class Publish>
  __device__ __forceinline__ void combine(Publish publish) const {
    if (matrix < kMatrices && team % kLinesSummed == 0) {
      // Neighbouring threads write to neighbouring addresses.
      State* const to = states + (matrix * kSets + team / kLinesSummed) * kStatesOfSet + pack;
#pragma unroll
      for (int s = 0; s < kStates; ++s) to[s * kPacks] = {pivot[s], sum[s]};
    }
    __syncthreads();
    for_rows([&](int row, int lane, bool exists) {
      auto state = combine_all<Op>(lane, exists ? kStatesOfRow : 0, kLanes, [&](int i) {
        const int set = i / kStatesOfLine;
        return state_of_set(row, set, i - set * kStatesOfLine);
      });
      state = combine_over_lanes<Op, kLanes>(state);
      if (exists && lane == 0) publish(row, state);
    });
  }
  // Calls body(row, lane, exists) for each row, in each of its kLanes lanes. All lanes of a warp call body together,
  // since they shuffle: those without a row get the last one, with exists = false.
  template <class Body>
  static __device__ __forceinline__ void for_rows(Body body) {
    for (int at = threadIdx.x; at / 32 * 32 < kRows * kLanes; at += kThreads) {
      const int row = at / kLanes;
      body(min(row, kRows - 1), at % kLanes, row < kRows);
    }
  }

  // The offsets of a row's first element, for numbers and labels; not computed for operators without them.
  __device__ __forceinline__ typename Mem::Offsets begin_of(int row) const {
    if constexpr (Op::kRowNumbers == 0 && !Op::kReadsLabelElement) return {};
    const int of_matrix = kMatrices == 1 ? 0 : row / kElements;
    const int64_t last = mem.operands.rows / kInner - 1, element = first_element + row - of_matrix * kElements;
    return this->in_first_line(min(first_matrix() + of_matrix, last), min(element, kInner - 1));
  }
  // Stores the results of rows, given the states of whole rows.
  __device__ __forceinline__ void store_rows() const {
    if constexpr (Op::kRowResults > 0) {
      for (int row = threadIdx.x; row < kMatrices * kElements; row += kThreads) {
        const int of_matrix = kMatrices == 1 ? 0 : row / kElements;
        const int64_t element = first_element + row - of_matrix * kElements;
        const int64_t at = (first_matrix() + of_matrix) * kInner + element;
        if (element < kInner && at < mem.operands.rows) {
          mem.store_row(at, whole(row), mem.label_element(begin_of(row)));
        }
      }
    }
  }
  __device__ __forceinline__ int64_t first_matrix() const { return outer - (kMatrices > 1 ? matrix : 0); }

  // ---- results

  // Writes the results, with the states of whole rows that shared memory has or, if these are private, the thread.
  __device__ __forceinline__ void finish() const {
    Finished finished[kStates];
    typename Mem::Addend addend[kStates] = {};
    finish_states(finished);
    if constexpr (Op::kAddsAtLabel) {
      for_rows_of_thread([&](int s, int row) { addend[s] = mem.addend(begin_of(row)); });
    }
    if constexpr (kInShared) {
#pragma unroll 4
      for (int t = 0; t < kLinesOfThread; ++t) {
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
      Pack raw[kLinesOfThread][kInputs];
#pragma unroll
      for (int t = 0; t < kLinesOfThread; ++t) this->template read<0>(raw[t], t);
#pragma unroll
      for (int t = 0; t < kLinesOfThread; ++t) {
        Values v;
        C result[kWidth];
        this->values_of(v, raw[t], t);
        results_of(result, v, finished);
        store(t, result, addend);
      }
    }
  }

 private:
  // What makes a result of a term or, where terms do not fit, of an element.
  using Finished = typename Conditional<kTermsFit, typename Op::Scale, typename Op::Finished>::type;

  __device__ __forceinline__ void finish_states(Finished (&finished)[kStates]) const {
    const auto prepare = [&](int s, const State& state, const typename Mem::Offsets& begin) {
      if constexpr (kTermsFit) {
        finished[s] = mem.term_scale(state, pivot[s], begin);
      } else {
        finished[s] = mem.finished(state, begin);
      }
    };
    if constexpr (kPrivate) {
#pragma unroll
      for (int s = 0; s < kStates; ++s) prepare(s, {pivot[s], sum[s]}, {});
    } else {
      for_rows_of_thread([&](int s, int row) { prepare(s, whole(row), begin_of(row)); });
    }
  }
  static __device__ __forceinline__ void results_of(C (&result)[kWidth], const Values& v,
                                                    const Finished (&finished)[kStates]) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) result[e] = Op::finish(finished[e % kStates], v[e]);
  }
  __device__ __forceinline__ void store(int nth, C (&result)[kWidth],
                                        const typename Mem::Addend (&addend)[kStates]) const {
    const auto location = this->locate(nth);
    if (!location.stored) return;
    const bool counts = Mem::mask_and_add(
        result, this->unmasked(location), [&](int e) { return addend[e % kStates]; },
        [&](int e) { return this->column(location, e); });
    mem.store(mem.out() + location.element, location.element, result, counts, typename Part::Reader{*this, location},
              location.stored);
  }
};

}  // namespace jax_softmax::device
