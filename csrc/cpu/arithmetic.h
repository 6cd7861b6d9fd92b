// The operators on blocks, by vectors whose lanes lie along rows or across them.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/block.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

constexpr int64_t kSteps = 64;  // of a sum, one after the other, lest a long one swallow small terms

template <template <class> class OpOf, class F>
class Operator {
 public:
  static Arithmetic<F> arithmetic() {
    return {{along_accumulate, along_finish},
            {across_accumulate, across_finish},
            identity,
            combine,
            Op::kInputs,
            Op::kResultIsScaledTerm,
            Op::pad(0)[0],
            Op::masked()[0]};
  }

 private:
  using M = Simd<F>;
  using Op = OpOf<M>;
  using C = typename M::Value;
  static constexpr int kLanes = M::kLanes;

  static void identity(States<F>* states, int64_t n) { std::fill_n(states, n, jax_softmax::identity<Op, M>()); }
  static void combine(States<F>* states, const States<F>* later, int64_t n) {
    for (int64_t i = 0; i < n; ++i) states[i] = jax_softmax::combine<Op, M>(states[i], later[i]);
  }

  // ---- Lanes along rows. What the lanes of each row amount to is put together for as many rows as there are lanes.

  static void along_accumulate(const Block<F>& block, bool keep, States<F>* states) {
    for (int64_t first = 0; first < block.rows; first += kLanes, ++states) {
      const int rows = static_cast<int>(std::min<int64_t>(kLanes, block.rows - first));
      C of_row[kLanes];
      for (int r = rows; r < kLanes; ++r) of_row[r] = M::constant(0);
      *states = {M::constant(0), M::constant(0)};
      if constexpr (Op::kHasPivot) {
        for (int r = 0; r < rows; ++r) of_row[r] = largest(block.in[0] + (first + r) * block.step, block.elements);
        states->pivot = M::of_rows(of_row, [](C a, C b) { return M::max(a, b); });
      }
      F pivots[kLanes];
      M::store(pivots, states->pivot);
      for (int r = 0; r < rows; ++r) {
        const int64_t at = (first + r) * block.step;
        const F* const in[2] = {block.in[0] + at, block.in[1] + at};
        const Relative<M> relative(M::constant(pivots[r]));
        if constexpr (Op::kResultIsScaledTerm) {
          F* const out = block.out + at;
          of_row[r] = keep ? sum_of_terms<true>(relative, in, out, block.elements)
                           : sum_of_terms<false>(relative, in, out, block.elements);
        } else {
          of_row[r] = sum_of_terms<false>(relative, in, nullptr, block.elements);
        }
      }
      states->sum = M::of_rows(of_row, [](C a, C b) { return a + b; });
    }
  }

  // Calls body(i, n, chain) for each vector of n elements from the i-th on. Vectors of different chains need not wait
  // for one another.
  static constexpr int kChains = 4;
  template <class Body>
  static JAX_SOFTMAX_INLINE void for_vectors(int64_t begin, int64_t end, Body body) {
    int64_t i = begin;
    for (; i + kChains * kLanes <= end; i += kChains * kLanes) {
      unrolled<kChains>([&](auto chain) __attribute__((always_inline)) { body(i + chain * kLanes, kLanes, chain); });
    }
    for (; i < end; i += kLanes) body(i, static_cast<int>(std::min<int64_t>(kLanes, end - i)), 0);
  }

  static JAX_SOFTMAX_INLINE C largest(const F* in, int64_t elements) {
    C chains[kChains];
    for (C& chain : chains) chain = Op::pad(0);
    for_vectors(0, elements, [&](int64_t i, int n, int chain) __attribute__((always_inline)) {
      chains[chain] = M::max(chains[chain], load(in + i, n, 0));
    });
    return M::max(M::max(chains[0], chains[1]), M::max(chains[2], chains[3]));
  }

  template <bool kKeep>
  static JAX_SOFTMAX_INLINE C sum_of_terms(Relative<M> relative, const F* const* in, F* out, int64_t elements) {
    C sum = M::constant(0);
    for (int64_t begin = 0; begin < elements;) {
      const int64_t end = std::min(elements, begin + kSteps * kChains * kLanes);
      C chains[kChains];
      for (C& chain : chains) chain = M::constant(0);
      for_vectors(begin, end, [&](int64_t i, int n, int chain) __attribute__((always_inline)) {
        C v[2];
        for (int k = Op::kFirstSummed; k < Op::kInputs; ++k) v[k] = load(in[k] + i, n, k);
        const C term = Op::term(relative, v);
        if constexpr (kKeep) store(out + i, term, n);
        chains[chain] = chains[chain] + term;
      });
      sum = sum + ((chains[0] + chains[1]) + (chains[2] + chains[3]));
      begin = end;
    }
    return sum;
  }

  static void along_finish(const Block<F>& block, bool kept, const States<F>* states) {
    using Row = typename Op::Row;
    constexpr int kMembers = sizeof(Row) / sizeof(C);
    for (int64_t first = 0; first < block.rows; first += kLanes, ++states) {
      const int rows = static_cast<int>(std::min<int64_t>(kLanes, block.rows - first));
      const Row finished = Op::row(*states);
      F members[kMembers][kLanes];
      std::memcpy(members, &finished, sizeof(Row));
      for (int r = 0; r < rows; ++r) {
        C of_row[kMembers];
        for (int k = 0; k < kMembers; ++k) of_row[k] = M::constant(members[k][r]);
        Row row;
        std::memcpy(&row, of_row, sizeof(Row));
        const int64_t at = (first + r) * block.step;
        for_vectors(0, block.elements, [&](int64_t i, int n, int) __attribute__((always_inline)) {
          store(block.out + at + i, result(row, block, kept, at + i, n), n);
        });
      }
    }
  }

  static JAX_SOFTMAX_INLINE C result(const typename Op::Row& row, const Block<F>& block, bool kept, int64_t at, int n) {
    if constexpr (Op::kResultIsScaledTerm) {
      if (kept) return load(block.out + at, n, 0) * row.scale;
    }
    C v[2];
    for (int k = 0; k < Op::kInputs; ++k) v[k] = load(block.in[k] + at, n, k);
    return Op::finish(row, v);
  }

  static JAX_SOFTMAX_INLINE C load(const F* p, int n, int k) {
    return n == kLanes ? M::load(p) : M::load_first(p, n, Op::pad(k));
  }
  static JAX_SOFTMAX_INLINE void store(F* p, C v, int n) { n == kLanes ? M::store(p, v) : M::store_first(p, v, n); }

  // ---- Lanes across rows, each a row of its own. Memory is read as it lies, some elements of each vector of rows at
  // once, so that their states are not loaded for each.

  static constexpr int kTogether = 8;

  // Calls body(t, r, n) for each vector t of rows and n elements from the r-th on.
  template <class Body>
  static JAX_SOFTMAX_INLINE void for_elements(const Block<F>& block, int64_t begin, int64_t end, Body body) {
    for (int64_t r = begin; r < end; r += kTogether) {
      const int n = static_cast<int>(std::min<int64_t>(kTogether, end - r));
      for (int64_t t = 0; t < block.rows / kLanes; ++t) body(t, r * block.step + t * kLanes, n);
    }
  }

  static void across_accumulate(const Block<F>& block, bool keep, States<F>* states) {
    const int64_t vectors = block.rows / kLanes;
    identity(states, vectors);
    if constexpr (Op::kHasPivot) {
      for_elements(block, 0, block.elements, [&](int64_t t, int64_t at, int n) __attribute__((always_inline)) {
        C pivot = states[t].pivot;
        for (int u = 0; u < n; ++u, at += block.step) pivot = M::max(pivot, M::load(block.in[0] + at));
        states[t].pivot = pivot;
      });
    }
    C sums[kMostVectors];
    for (int64_t begin = 0; begin < block.elements; begin += kSteps * kTogether) {
      const int64_t end = std::min(block.elements, begin + kSteps * kTogether);
      std::fill_n(sums, vectors, M::constant(0));
      for_elements(block, begin, end, [&](int64_t t, int64_t at, int n) __attribute__((always_inline)) {
        const Relative<M> relative(states[t].pivot);
        C sum = M::constant(0);
        for (int u = 0; u < n; ++u, at += block.step) {
          C v[2];
          for (int k = Op::kFirstSummed; k < Op::kInputs; ++k) v[k] = M::load(block.in[k] + at);
          const C term = Op::term(relative, v);
          if constexpr (Op::kResultIsScaledTerm) {
            if (keep) M::store(block.out + at, term);
          }
          sum = sum + term;
        }
        sums[t] = sums[t] + sum;
      });
      for (int64_t t = 0; t < vectors; ++t) states[t].sum = states[t].sum + sums[t];
    }
  }

  static void across_finish(const Block<F>& block, bool kept, const States<F>* states) {
    typename Op::Row rows[kMostVectors];
    for (int64_t t = 0; t < block.rows / kLanes; ++t) rows[t] = Op::row(states[t]);
    for_elements(block, 0, block.elements, [&](int64_t t, int64_t at, int n) __attribute__((always_inline)) {
      for (int u = 0; u < n; ++u, at += block.step) {
        M::store(block.out + at, result(rows[t], block, kept, at, kLanes));
      }
    });
  }
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
