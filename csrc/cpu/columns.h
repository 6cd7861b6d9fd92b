// The schedule of lanes across rows.
#pragma once

#include <algorithm>
#include <memory>

#include "cpu/stage.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

// The lanes lie across rows, each lane a row of its own. Where neighbouring columns are kept and there are enough of
// them, a tile is a block of columns, wide enough for the processor to see runs of memory in it. Elsewhere it is rows
// that pass through a stage.
template <template <class> class OpOf, class T, bool kMasked>
class Columns {
 public:
  using A = Access<OpOf, T, kMasked>;
  using M = typename A::M;
  using C = typename A::C;
  using Op = typename A::Op;
  static constexpr int kLanes = A::kLanes;
  static constexpr int kVectors = 128;    // side by side in a tile, at most
  static constexpr int64_t kBlock = 512;  // as in Rows, in elements of a row
  static constexpr bool kHolds = Op::kHasPivot;

  Columns(const View& view, const Operands& operands, int64_t)
      : view_(view),
        inner_(view.minor_reduced ? Dim{1, 1, 0} : view.kept.dim[view.kept.size - 1]),
        staged_(inner_.extent < kLanes),
        tile_vectors_(tile_vectors(view)),
        across_(staged_ ? 1 : ceil_div(inner_.extent / kLanes, tile_vectors_)),
        access_(operands, inner_.side[0]),
        stage_(view, access_) {}

  // Short rows, and rows of short runs, fill vectors better across rows than along them.
  static bool suits(const View& view) {
    return !view.minor_reduced || view.columns <= kShortRow ||
           view.reduced.dim[view.reduced.size - 1].extent < kShortRun;
  }

  // Whether tiles are held between the passes: their elements are converted once and, if the result is made of its
  // terms, these are computed once.
  static bool holds(const View& view) {
    return kHolds && view.columns * kRun * static_cast<int64_t>(sizeof(C)) <= kHeldBytes;
  }

  static int64_t part_unit(const View&) { return kBlock; }
  int64_t tiles() const { return staged_ ? stage_.tiles() : view_.rows / inner_.extent * across_; }
  int64_t most_vectors() const {
    return staged_ ? stage_.width() / kLanes : std::min(tile_vectors_ + 1, ceil_div(inner_.extent, kLanes));
  }
  int vectors() const { return vectors_; }

  void seek(int64_t tile, int64_t begin, int64_t end) {
    begin_ = begin;
    end_ = end;
    if (staged_) {
      stage_.seek(tile);
      width_ = stage_.width();
    } else {
      const int64_t first = tile % across_ * tile_vectors_ * kLanes;
      base_ = offset_of(view_.kept, view_.kept.size - 1, tile / across_) + first * inner_;
      width_ = tile % across_ + 1 < across_ ? tile_vectors_ * kLanes : inner_.extent - first;
    }
    vectors_ = static_cast<int>(ceil_div(width_, kLanes));
  }

  void run_held() {
    if (!held_) held_.reset(new C[view_.columns * most_vectors()]);
    C* const held = held_.get();
    State<C> state[kVectors];
    for (int t = 0; t < vectors_; ++t) state[t] = identity<Op, M>();
    for_groups<true, false>(0, view_.columns, [&](const A& access, auto& at, int64_t r) {
      constexpr int n = sizeof(at) / sizeof(Offset);
      for (int t = 0; t < vectors_; ++t) {
        C pivot = state[t].pivot;
        unrolled<n>([&](auto u) __attribute__((always_inline)) {
          C v[Op::kInputs];
          access.load(v, across(access, at[u], t), kLanes);
          held[(r + u) * vectors_ + t] = v[0];
          pivot = M::max(pivot, v[0]);
        });
        state[t].pivot = pivot;
      }
    });
    for (int t = 0; t < vectors_; ++t) sum_terms(held + t, state[t]);
    typename Op::Row finished[kVectors];
    for (int t = 0; t < vectors_; ++t) finished[t] = Op::row(state[t]);
    for_groups<kMasked, true>(0, view_.columns, [&](const A& access, auto& at, int64_t r) {
      for (const Offset& element : at) {
        const C* const here = held + r++ * vectors_;
        for (int t = 0; t < vectors_; ++t) {
          C result;
          if constexpr (Op::kResultIsScaledTerm) {
            result = here[t] * finished[t].scale;
          } else {
            result = Op::finish(finished[t], here + t);
          }
          access.store(result, across(access, element, t), kLanes);
        }
      }
    });
  }

  void accumulate(int64_t begin, int64_t end, State<C>* state) {
    State<C> block[kVectors];
    for (; begin < end; begin += kBlock) {
      for (int t = 0; t < vectors_; ++t) block[t] = identity<Op, M>();
      for_groups<true, false>(begin, std::min(end, begin + kBlock), [&](const A& access, auto& at, int64_t) {
        constexpr int n = sizeof(at) / sizeof(Offset);
        for (int t = 0; t < vectors_; ++t) {
          C v[n][Op::kInputs];
          unrolled<n>([&](auto u)
                          __attribute__((always_inline)) { access.load(v[u], across(access, at[u], t), kLanes); });
          jax_softmax::accumulate<Op, M>(block[t], v);
        }
      });
      for (int t = 0; t < vectors_; ++t) state[t] = combine<Op, M>(state[t], block[t]);
    }
  }

  void finish(int64_t begin, int64_t end, const State<C>* state) {
    typename Op::Row finished[kVectors];
    for (int t = 0; t < vectors_; ++t) finished[t] = Op::row(state[t]);
    for_groups<true, true>(begin, end, [&](const A& access, auto& at, int64_t) {
      for (const Offset& element : at) {
        for (int t = 0; t < vectors_; ++t) {
          C v[Op::kInputs];
          access.load(v, across(access, element, t), kLanes);
          access.store(Op::finish(finished[t], v), across(access, element, t), kLanes);
        }
      }
    });
  }

 private:
  static constexpr int64_t kShortRow = Op::kHasPivot ? 64 : 23, kShortRun = 2 * kLanes;
  // The fewest vectors of a tile whose columns are neighbours: they make several lines of the cache.
  static constexpr int64_t kRun = 256 / sizeof(T) / kLanes;

  static int64_t tile_vectors(const View& view) {
    const int64_t fit = kHeldBytes / (view.columns * (holds(view) ? sizeof(C) : 2 * kLanes * sizeof(T) * Op::kInputs));
    if (fit < kRun) return kVectors / 2;  // what is read again is no longer in the second cache anyway
    return std::min<int64_t>(fit / kRun * kRun, kVectors - kRun);
  }

  // Of one vector of the held tile, with the pivot found before.
  void sum_terms(C* held, State<C>& state) {
    const Relative<M> relative(state.pivot);
    const auto term = [&](int64_t r) __attribute__((always_inline)) {
      C* const v = held + r * vectors_;
      const C result = Op::term(relative, v);
      if constexpr (Op::kResultIsScaledTerm) *v = result;
      return result;
    };
    for (int64_t r = 0; r < view_.columns;) {
      const int64_t end = std::min(view_.columns, r + kBlock);
      C block = M::constant(0);
      for (; r + kUnroll <= end; r += kUnroll) {
        C sum = term(r);
        unrolled<kUnroll - 1>([&](auto u) __attribute__((always_inline)) { sum = sum + term(r + 1 + u); });
        block = block + sum;
      }
      for (; r < end; ++r) block = block + term(r);
      state.sum = state.sum + block;
    }
  }

  // Calls body(access, at, r) for elements r and following of the rows, which lie at the offsets in the array `at`: of
  // kUnroll of them or, at the end, of one.
  template <bool kLoad, bool kStore, class Body>
  JAX_SOFTMAX_INLINE void for_groups(int64_t begin, int64_t end, Body body) {
    if (!staged_) {
      Odometer odometer(view_.reduced, view_.reduced.size, begin);
      return walk(access_, base_, odometer, begin, end, body);
    }
    for (int64_t next; begin < end; begin = next) {
      const int64_t first = begin - (begin - begin_) % stage_.length();
      const int64_t last = std::min(end_, first + stage_.length());
      next = std::min(end, last);
      if constexpr (kLoad) stage_.load(first, last);
      Odometer odometer(stage_.dims(), 1, begin - first);
      walk(stage_.access(), Offset{0, 0}, odometer, begin, next, body);
      if constexpr (kStore) stage_.store(first, last);
    }
  }

  template <class Body>
  static JAX_SOFTMAX_INLINE void walk(const A& access, Offset base, Odometer& odometer, int64_t begin, int64_t end,
                                      Body& body) {
    for (; begin + kUnroll <= end; begin += kUnroll) {
      Offset at[kUnroll];
      odometer.next(at);
      for (Offset& element : at) element = base + element;
      body(access, at, begin);
    }
    for (; begin < end; ++begin, odometer.advance()) {
      Offset at[1] = {base + odometer.offset()};
      body(access, at, begin);
    }
  }

  // Vector t of the tile at an element; the last one may overlap the one before.
  JAX_SOFTMAX_INLINE Offset across(const A& access, Offset at, int t) const {
    const int64_t column = std::min<int64_t>(t * kLanes, width_ - kLanes);
    return {at.element + column, at.mask + column * access.mask_stride};
  }

  const View& view_;
  const Dim inner_;
  const bool staged_;
  const int64_t tile_vectors_, across_;
  const A access_;
  Stage<A, T> stage_;
  int64_t begin_ = 0, end_ = 0;
  Offset base_{0, 0};
  int64_t width_ = 0;
  int vectors_ = 0;
  std::unique_ptr<C[]> held_;
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
