// The schedule of lanes along rows.
#pragma once

#include <algorithm>
#include <memory>

#include "cpu/parts.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

// Minor axis reduced: the lanes lie along the row, in runs of its contiguous innermost dimension. A tile is a row or,
// where the runs of neighbouring rows alternate in memory, some of those, so that memory is read as it lies.
template <template <class> class OpOf, class T, bool kMasked>
class Rows {
 public:
  using A = Access<OpOf, T, kMasked>;
  using M = typename A::M;
  using C = typename A::C;
  using Op = typename A::Op;
  static constexpr int kLanes = A::kLanes;
  static constexpr int kVectors = 64;    // rows of a tile, at most
  static constexpr int64_t kSteps = 64;  // of a sum, one after the other, lest a long one swallow small terms
  static constexpr int64_t kBlock = kSteps * kUnroll * kLanes;
  static constexpr bool kHolds = Op::kResultIsScaledTerm;

  Rows(const View& view, const Operands& operands, int64_t threads)
      : view_(view),
        outer_(view.reduced.size - 1),
        length_(view.reduced.dim[outer_].extent),
        alternating_(alternating(view)),
        across_(alternating_ ? view.kept.dim[view.kept.size - 1] : Dim{1, 0, 0}),
        groups_(ceil_div(across_.extent, most_rows(view, threads))),
        access_(operands, view.reduced.dim[outer_].side[0]) {}

  // Whether the terms are held between the passes, so that they are computed once: where there is room for as many rows
  // as lie side by side in some lines of the cache.
  static bool holds(const View& view) {
    return kHolds && held_bytes(view) * (alternating(view) ? ceil_div(kFewBytes, run_bytes(view)) : 1) <= kHeldBytes;
  }
  static int64_t part_unit(const View& view) { return alternating(view) ? kBlock : 16 * kBlock; }
  int64_t tiles() const { return view_.rows / across_.extent * groups_; }
  int most_vectors() const { return static_cast<int>(ceil_div(across_.extent, groups_)); }
  int vectors() const { return rows_; }
  void seek(int64_t tile, int64_t, int64_t) {
    const int64_t group = tile % groups_, first = group * most_vectors();
    rows_ = static_cast<int>(std::min<int64_t>(most_vectors(), across_.extent - first));
    base_ = offset_of(view_.kept, view_.kept.size - alternating_, tile / groups_) + first * across_;
  }

  void run_held() {
    const int64_t of_row = held_vectors(view_);
    if (!held_) held_.reset(new C[of_row * most_vectors()]);
    // Several maxima and sums side by side: each alone would wait for the one before.
    constexpr int kChains = 8;
    // Calls body(at, n, others, held, chain) for each vector of n elements of a run, and its place among those that are
    // held. The last vector comes first, so that where it is stored whole the others overwrite what is not its own.
    const auto for_vectors = [&](Offset at, int64_t length, C* held, auto body) __attribute__((always_inline)) {
      const int full = static_cast<int>(length / kLanes), rest = static_cast<int>(length % kLanes);
      if (rest > 0) body(along(at, length - rest), rest, full > 0, held + full, 0);
      int i = 0;
      for (; i + kChains <= full; i += kChains) {
        unrolled<kChains>([&](auto u) __attribute__((always_inline)) {
          body(along(at, (i + u) * kLanes), kLanes, false, held + i + u, u);
        });
      }
      for (; i < full; ++i) body(along(at, i * kLanes), kLanes, false, held + i, 0);
    };
    C pivot[kVectors], scale[kVectors];
    for (int r = 0; r < rows_; ++r) pivot[r] = Op::pad(0);
    const C* const begin = held_.get();
    C* run = held_.get();
    for_runs(0, view_.columns, [&](Offset at, int64_t length) __attribute__((always_inline)) {
      for (int r = 0; r < rows_; ++r) {
        C chains[kChains];
        chains[0] = pivot[r];
        const int used = length >= kChains * kLanes ? kChains : 1;
        for (int u = 1; u < used; ++u) chains[u] = pivot[r];
        for_vectors(at + r * across_, length, run + r * of_row,
                    [&](Offset here, int n, bool others, C* held, int chain) __attribute__((always_inline)) {
                      load(reinterpret_cast<C(&)[1]>(*held), here, n, others);
                      chains[chain] = M::max(chains[chain], *held);
                    });
        for (int u = 1; u < used; ++u) chains[0] = M::max(chains[0], chains[u]);
        pivot[r] = chains[0];
      }
      run += ceil_div(length, kLanes);
    });
    constexpr int kBlockVectors = kBlock / kLanes;
    const int vectors = static_cast<int>(run - begin);
    for (int r = 0; r < rows_; ++r) {
      const C largest = M::across_lanes(pivot[r], kMaximum);
      const Relative<M> relative(largest);
      C* const held = held_.get() + r * of_row;
      C sums[kChains], sum = M::constant(0);
      for (int i = 0; i < vectors;) {
        const int end = std::min(vectors, i + kBlockVectors);
        for (int u = 0; u < kChains; ++u) sums[u] = M::constant(0);
        const auto add = [&](int chain) __attribute__((always_inline)) {
          held[i] = Op::term(relative, &held[i]);
          sums[chain] = sums[chain] + held[i++];
        };
        while (i + kChains <= end) unrolled<kChains>(add);
        while (i < end) add(0);
        for (int u = 1; u < kChains; ++u) sums[0] = sums[0] + sums[u];
        sum = sum + sums[0];
      }
      scale[r] = Op::row({largest, M::across_lanes(sum, kSum)}).scale;
    }
    run = held_.get();
    for_runs(0, view_.columns, [&](Offset at, int64_t length) __attribute__((always_inline)) {
      for (int r = 0; r < rows_; ++r) {
        for_vectors(at + r * across_, length, run + r * of_row,
                    [&](Offset here, int n, bool others, const C* held, int) __attribute__((always_inline)) {
                      const C y = *held * scale[r];
                      others ? access_.store(y, access_.before(here, kLanes - n), kLanes) : access_.store(y, here, n);
                    });
      }
      run += ceil_div(length, kLanes);
    });
  }

  JAX_SOFTMAX_INLINE void accumulate(int64_t begin, int64_t end, State<C>* state) {
    if (outer_ == 0) return accumulate_run(along(base_, begin), end - begin, *state);
    State<C> block[kVectors];  // of some short runs, as of a part of a long one
    int64_t steps = 0;
    const auto add_blocks = [&] {
      for (int r = 0; r < rows_ && steps > 0; ++r) state[r] = combine<Op, M>(state[r], block[r]);
      for (int r = 0; r < rows_; ++r) block[r] = identity<Op, M>();
      steps = 0;
    };
    add_blocks();
    for_runs(begin, end, [&](Offset at, int64_t length) __attribute__((always_inline)) {
      if (length > kBlock) {
        for (int r = 0; r < rows_; ++r) accumulate_run(at + r * across_, length, state[r]);
        return;
      }
      const int64_t vectors = length / kLanes, more = vectors / kUnroll + vectors % kUnroll + (length % kLanes > 0);
      if (steps + more > kSteps) add_blocks();
      for (int r = 0; r < rows_; ++r) accumulate_block(at + r * across_, 0, length, block[r]);
      steps += more;
    });
    add_blocks();
  }

  JAX_SOFTMAX_INLINE void finish(int64_t begin, int64_t end, State<C>* state) {
    typename Op::Row finished[kVectors];
    for (int r = 0; r < rows_; ++r) {
      if constexpr (Op::kHasPivot) {
        const C pivot = M::across_lanes(state[r].pivot, kMaximum);
        state[r].sum = state[r].sum * Relative<M>(pivot).rescale(state[r].pivot);
        state[r].pivot = pivot;
      }
      state[r].sum = M::across_lanes(state[r].sum, kSum);
      finished[r] = Op::row(state[r]);
    }
    for_runs(begin, end, [&](Offset first, int64_t length) __attribute__((always_inline)) {
      for (int r = 0; r < rows_; ++r) {
        const Offset at = first + r * across_;
        // By one and the same code, however short a run or a part of it is: in another copy of it the compiler may
        // round a product that it does not round here.
        const int n = static_cast<int>(std::min<int64_t>(length, kLanes));
        for (int64_t i = 0; i < length; i += kLanes) {  // the last vector overlaps the one before
          finish_vector(along(at, std::min(i, length - n)), n, finished[r]);
        }
      }
    });
  }

 private:
  static constexpr auto kMaximum = [](auto a, auto b) { return b > a ? b : a; };
  static constexpr auto kSum = [](auto a, auto b) { return a + b; };

  static constexpr int64_t kTileBytes = 4 << 10, kFewBytes = 512;  // side by side in a tile, or a little more
  static constexpr int64_t kTilesOfThread = 8;                     // or parts of them, if there are many elements

  // Whether the innermost kept dimension lies between the two innermost reduced ones.
  static bool alternating(const View& view) {
    const int last = view.reduced.size - 1;
    return last > 0 && view.kept.size > 0 &&
           view.kept.dim[view.kept.size - 1].stride < view.reduced.dim[last - 1].stride;
  }
  static int64_t run_bytes(const View& view) {
    return view.reduced.dim[view.reduced.size - 1].extent * static_cast<int64_t>(sizeof(T));
  }
  static int64_t most_rows(const View& view, int64_t threads) {
    const int64_t few = ceil_div(kFewBytes, run_bytes(view)), many = ceil_div(kTileBytes, run_bytes(view));
    // No more than what keeps a thread busy for a while: tiles, or parts of them, are what threads share out.
    const int64_t elements = std::max(8 * kBlock, view.rows * view.columns / (kTilesOfThread * threads));
    const int64_t rows = holds(view) ? kHeldBytes / 2 / held_bytes(view) : elements / std::min(view.columns, kBlock);
    return std::min<int64_t>(std::clamp(rows, few, many), kVectors);
  }
  static int64_t held_vectors(const View& view) {
    const int64_t length = view.reduced.dim[view.reduced.size - 1].extent;
    return view.columns / length * ceil_div(length, kLanes);
  }
  static int64_t held_bytes(const View& view) { return held_vectors(view) * static_cast<int64_t>(sizeof(C)); }

  // Calls body(at, length) for each contiguous piece of the row's elements [begin, end).
  template <class Body>
  JAX_SOFTMAX_INLINE void for_runs(int64_t begin, int64_t end, Body body) {
    if (outer_ == 0) return body(along(base_, begin), end - begin);  // short rows would notice the divisions
    int64_t skipped = begin % length_;
    for (Odometer odometer(view_.reduced, outer_, begin / length_); begin < end; odometer.advance()) {
      const int64_t length = end - begin < length_ - skipped ? end - begin : length_ - skipped;
      body(along(base_ + odometer.offset(), skipped), length);
      begin += length;
      skipped = 0;
    }
  }

  JAX_SOFTMAX_INLINE Offset along(Offset base, int64_t i) const {
    return {base.element + i, base.mask + i * access_.mask_stride};
  }

  JAX_SOFTMAX_INLINE void accumulate_run(Offset base, int64_t length, State<C>& state) {
    if (length <= kBlock) return accumulate_block(base, 0, length, state);
    for (int64_t begin = 0; begin < length; begin += kBlock) {
      State<C> block = identity<Op, M>();
      accumulate_block(base, begin, length - begin < kBlock ? length : begin + kBlock, block);
      state = combine<Op, M>(state, block);
    }
  }

  JAX_SOFTMAX_INLINE void accumulate_block(Offset base, int64_t begin, int64_t end, State<C>& state) {
    int64_t i = begin;
    for (; i + kUnroll * kLanes <= end; i += kUnroll * kLanes) {
      C v[kUnroll][Op::kInputs];
      unrolled<kUnroll>(
          [&](auto u) __attribute__((always_inline)) { access_.load(v[u], along(base, i + u * kLanes), kLanes); });
      jax_softmax::accumulate<Op, M>(state, v);
    }
    // What is left, some vectors together as well, so that sums are rescaled once for them.
    const int rest = static_cast<int>((end - begin) % kLanes);
    int left = static_cast<int>((end - i) / kLanes) + (rest > 0);
    const auto add = [&](auto together) __attribute__((always_inline)) {
      constexpr int n = decltype(together)::value;
      C v[n][Op::kInputs];
      unrolled<n>([&](auto u) __attribute__((always_inline)) {
        const Offset at = along(base, i + u * kLanes);
        const bool last = (left == n) && u == n - 1 && rest > 0;
        last ? load(v[u], at, rest, i + u * kLanes > 0) : access_.load(v[u], at, kLanes);
      });
      jax_softmax::accumulate<Op, M>(state, v);
      i += n * kLanes;
      left -= n;
    };
    while (left >= 4) add(std::integral_constant<int, 4>());
    if (left == 3) return add(std::integral_constant<int, 3>());
    if (left == 2) return add(std::integral_constant<int, 2>());
    if (left == 1) add(std::integral_constant<int, 1>());
  }

  JAX_SOFTMAX_INLINE void finish_vector(Offset at, int n, const typename Op::Row& finished) const {
    C v[Op::kInputs];
    access_.load(v, at, n);
    access_.store(Op::finish(finished, v), at, n);
  }

  // `others`: whether there are enough elements of the run before these to load whole vectors.
  JAX_SOFTMAX_INLINE void load(C (&v)[Op::kInputs], Offset at, int n, bool others) const {
    if (n < kLanes && others) return access_.load_last(v, at, n);
    access_.load(v, at, n);
  }

  const View& view_;
  const int outer_;
  const int64_t length_;
  const bool alternating_;
  const Dim across_;  // from a tile's row to the next
  const int64_t groups_;
  const A access_;
  Offset base_;
  int rows_ = 1;
  std::unique_ptr<C[]> held_;
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
