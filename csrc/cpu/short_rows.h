// The schedule of short rows, several of them together.
#pragma once

#include <algorithm>

#include "cpu/parts.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

// Short rows that are runs of memory: the lanes lie along each, and as many rows as a vector has lanes are done
// together. What is left of a row in the lanes of a vector is put together for all of them at once, in as many steps as
// for one.
template <template <class> class OpOf, class T, bool kMasked>
class ShortRows {
 public:
  using A = Access<OpOf, T, kMasked>;
  using M = typename A::M;
  using C = typename A::C;
  using Op = typename A::Op;
  static constexpr int kLanes = A::kLanes;

  static bool suits(const View& view) {
    return kLanes >= 4 && view.contiguous_rows() && view.columns >= kFewestVectors * kLanes &&
           view.columns <= kMostVectors * kLanes;
  }
  static Work work(const View& view, int64_t threads) { return {threads, ceil_div(view.rows, kLanes), 0}; }

  static void run(const View& view, const Operands& operands, const Work&, void*, bool, int64_t first_unit,
                  int64_t last_unit) {
    const A access(operands, view.reduced.dim[0].side[0]);
    const int columns = static_cast<int>(view.columns), full = columns / kLanes, rest = columns % kLanes;
    Odometer odometer(view.kept, view.kept.size, first_unit * kLanes);
    for (int64_t unit = first_unit; unit < last_unit; ++unit) {
      const int rows = static_cast<int>(std::min<int64_t>(kLanes, view.rows - unit * kLanes));
      Offset base[kLanes];
      for (int r = 0; r < rows; ++r, odometer.advance()) base[r] = odometer.offset();
      run_together(access, base, rows, full, rest);
    }
  }

 private:
  // Vectors of a row: with fewer Columns is faster, with more, of which all rows' take this much of the first cache,
  // Rows. No more than 64 are added one after the other.
  static constexpr int kFewestVectors = !Op::kHasPivot ? 3 : sizeof(T) == 2 ? 5 : 4;
  static constexpr int kMostBytes = Op::kHasPivot ? 16 << 10 : 8 << 10;
  static constexpr int kMostVectors = std::min<int>(64, kMostBytes / (kLanes * Op::kInputs * sizeof(C)));

  // Calls body(t) for the first n vectors of a row.
  template <class Body>
  static JAX_SOFTMAX_INLINE void for_vectors(int n, Body body) {
    constexpr int kTogether = 4;
    int t = 0;
    for (; t + kTogether <= n; t += kTogether) {
      unrolled<kTogether>([&](auto u) __attribute__((always_inline)) { body(t + u); });
    }
    for (; t < n; ++t) body(t);
  }

  // Rows of `full` whole vectors and, if `rest` is not 0, one of so many elements.
  static JAX_SOFTMAX_INLINE void run_together(const A& access, const Offset* base, int rows, int full, int rest) {
    const int vectors = full + (rest > 0);
    const auto at = [&](int r, int t) __attribute__((always_inline)) {
      return Offset{base[r].element + t * kLanes, base[r].mask + t * kLanes * access.mask_stride};
    };
    C held[kLanes][kMostVectors][Op::kInputs], of_row[kLanes];
    for (int r = 0; r < kLanes; ++r) of_row[r] = Op::pad(0);
    for (int r = 0; r < rows; ++r) {
      C largest = Op::pad(0);
      const auto keep_largest = [&](int t) __attribute__((always_inline)) {
        if constexpr (Op::kHasPivot) largest = M::max(largest, held[r][t][0]);
      };
      if (rest > 0) {
        access.load_last(held[r][full], at(r, full), rest);
        keep_largest(full);
      }
      for_vectors(full, [&](int t) __attribute__((always_inline)) {
        access.load(held[r][t], at(r, t), kLanes);
        keep_largest(t);
      });
      of_row[r] = largest;
    }
    State<C> states{M::constant(0), M::constant(0)};  // a row to a lane
    if constexpr (Op::kHasPivot) states.pivot = of_rows<kLanes>(of_row, [](C a, C b) { return M::max(a, b); });
    C pivots[kLanes];
    spread(states.pivot, pivots);
    for (int r = 0; r < rows; ++r) {
      const Relative<M> relative(pivots[r]);
      C sum = M::constant(0);
      for_vectors(vectors, [&](int t) __attribute__((always_inline)) {
        const C term = Op::term(relative, held[r][t]);
        if constexpr (Op::kResultIsScaledTerm) held[r][t][0] = term;
        sum = sum + term;
      });
      of_row[r] = sum;
    }
    states.sum = of_rows<kLanes>(of_row, [](C a, C b) { return a + b; });

    using Row = typename Op::Row;
    constexpr int kMembers = sizeof(Row) / sizeof(C);
    const Row finished = Op::row(states);
    C members[kMembers], spread_members[kMembers][kLanes];
    std::memcpy(members, &finished, sizeof(Row));
    for (int k = 0; k < kMembers; ++k) spread(members[k], spread_members[k]);
    for (int r = 0; r < rows; ++r) {
      Row row;
      for (int k = 0; k < kMembers; ++k) members[k] = spread_members[k][r];
      std::memcpy(&row, members, sizeof(Row));
      const auto result = [&](int t) __attribute__((always_inline)) {
        if constexpr (Op::kResultIsScaledTerm) {
          return held[r][t][0] * row.scale;
        } else {
          return Op::finish(row, held[r][t]);
        }
      };
      // The last vector first, whole: what it writes of the one before is written again.
      if (rest > 0) access.store(result(full), access.before(at(r, full), kLanes - rest), kLanes);
      for_vectors(full, [&](int t) __attribute__((always_inline)) { access.store(result(t), at(r, t), kLanes); });
    }
  }

  static JAX_SOFTMAX_INLINE void spread(C v, C (&of_lane)[kLanes]) {
    for (int r = 0; r < kLanes; ++r) of_lane[r] = M::constant(v[r]);
  }

  // Of n vectors, in which so many neighbouring lanes belong together, those lanes put together with f: of vector i in
  // lane i. The order does not depend on i.
  template <int n, class Function>
  static JAX_SOFTMAX_INLINE C of_rows(C* v, Function f) {
    constexpr int kHalf = n / 2;
    using Lanes = std::make_integer_sequence<int, kLanes>;
    unrolled<kHalf>([&](auto i) __attribute__((always_inline)) {
      v[i] = f(halves<kHalf, false>(v[i], v[i + kHalf], Lanes()), halves<kHalf, true>(v[i], v[i + kHalf], Lanes()));
    });
    if constexpr (kHalf == 1) {
      return v[0];
    } else {
      return of_rows<kHalf>(v, f);
    }
  }
  // The lower or upper halves of a's and b's blocks of 2 * half lanes, side by side.
  template <int half, bool upper, int... lane>
  static JAX_SOFTMAX_INLINE C halves(C a, C b, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(a, b,
                                   (lane % (2 * half) < half ? lane + upper * half : kLanes + lane - !upper * half)...);
  }
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
