// The operators on blocks, by SIMD vectors: their lanes are elements of one row (along) or of different rows (across).
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/block.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

constexpr int64_t kSteps = 64;  // additions to one sum: longer sums would lose small terms

// Where the maximum is +inf, terms are taken relative to 0: their exponents may be positive.
template <class Arithmetic>
struct AnyExponent : Arithmetic {
  static JAX_SOFTMAX_INLINE typename Arithmetic::Value exp_from_pivot(typename Arithmetic::Value x) {
    return Arithmetic::exp(x);
  }
};
// The policy of an operator that has results of type Out.
template <template <class> class OpOf, class Arithmetic, class Out>
struct PolicyOf {
  using type =
      std::conditional_t<OpOf<Arithmetic>::kKeepsInfinity, KeepingInfinity<AnyExponent<Arithmetic>>, Arithmetic>;
};

// The arithmetic of AbsmaxScale. The maximum is NaN if an element is: magnitudes are compared by their bits, as
// integers, among which NaN is above infinity. A scale that would be subnormal is 0, and so are the row's results.
template <class Arithmetic>
struct Scaling : Arithmetic {
  using C = typename Arithmetic::Value;
  using Bits = typename Arithmetic::IntValue;
  static JAX_SOFTMAX_INLINE C abs(C x) {
    constexpr auto kMagnitude = std::numeric_limits<typename Arithmetic::Int>::max();
    return bits_as<C>(bits_as<Bits>(x) & kMagnitude);
  }
  static JAX_SOFTMAX_INLINE C max(C a, C b) {
    const Bits of_a = bits_as<Bits>(a), of_b = bits_as<Bits>(b);
    return bits_as<C>(of_b > of_a ? of_b : of_a);
  }
  static JAX_SOFTMAX_INLINE C normal_or_zero(C scale) {
    return scale < std::numeric_limits<typename Arithmetic::Scalar>::min() ? Arithmetic::constant(0) : scale;
  }
};
template <class Arithmetic, class Out>
struct ScaledTo : Scaling<Arithmetic> {
  using C = typename Arithmetic::Value;
  static JAX_SOFTMAX_INLINE C scale(C absmax) { return Scaling<Arithmetic>::normal_or_zero(absmax); }
  struct Scaler {
    C divisor;
    Scaler() = default;
    explicit JAX_SOFTMAX_INLINE Scaler(C absmax) : divisor(scale(absmax)) {
      divisor = divisor == 0 ? Arithmetic::constant(Arithmetic::kInfinity) : divisor;
    }
    friend JAX_SOFTMAX_INLINE C operator*(C x, const Scaler& scaler) { return x / scaler.divisor; }
  };
};
template <class Arithmetic>
struct ScaledTo<Arithmetic, Int8> : Scaling<Arithmetic> {
  using C = typename Arithmetic::Value;
  static constexpr float kLargest = 127;
  static JAX_SOFTMAX_INLINE C scale(C absmax) { return Scaling<Arithmetic>::normal_or_zero(absmax * (1 / kLargest)); }
  struct Scaler {
    C value;
    Scaler() = default;
    explicit JAX_SOFTMAX_INLINE Scaler(C absmax)
        : value(scale(absmax) == 0 ? Arithmetic::constant(0) : kLargest / absmax) {}
    friend JAX_SOFTMAX_INLINE C operator*(C x, const Scaler& scaler) { return x * scaler.value; }
  };
};
template <class Arithmetic, class Out>
struct PolicyOf<AbsmaxScale, Arithmetic, Out> {
  using type = ScaledTo<Arithmetic, Out>;
};

// An operator on elements of type T, with results of type Out.
template <template <class> class OpOf, class T, class Out, bool kMasked>
class OperatorOnBlocks {
 public:
  static constexpr BlockFunctions<T> functions() {
    constexpr bool kKeep = Op::kResultIsScaledTerm;
    BlockFunctions<T> functions{{along_accumulate<false>, nullptr},
                                {across_accumulate<false>, nullptr},
                                {along_accumulate<kKeep>, nullptr},
                                {across_accumulate<kKeep>, nullptr},
                                identity,
                                combine,
                                nullptr,
                                nullptr,
                                nullptr,
                                Op::kInputs,
                                sizeof(Out),
                                kKeep};
    if constexpr (Op::kElementResults) {
      functions.along.finish = along_finish<false>;
      functions.across.finish = across_finish<false>;
      functions.keeping_along.finish = along_finish<kKeep>;
      functions.keeping_across.finish = across_finish<kKeep>;
    }
    if constexpr (Op::kRowResults > 0) functions.row_results = row_results;
    if constexpr (kFinishTakesNumbers) functions.take_numbers = take_numbers;
    if constexpr (Op::kAddsAtLabel) functions.finish_labels = finish_labels;
    return functions;
  }

 private:
  using F = typename Convert<T>::Compute;
  using M = typename PolicyOf<OpOf, Simd<F>, Out>::type;
  using Op = OpOf<M>;
  using C = typename M::Value;
  using Sum = typename Op::Sum;
  using State = StateOf<Op>;
  using Terms = typename Op::Terms;
  static_assert(!Op::kReadsLabelElement, "CPU kernels do not read the elements at labels");
  static constexpr int kLanes = M::kLanes;
  static constexpr bool kFinishTakesNumbers = Op::kRowNumbers > 0 && Op::kElementResults;
  static constexpr bool kTermsTakeNumbers = !std::is_same_v<Terms, Relative<M>>;
  static constexpr auto kMax = [](C a, C b) { return M::max(a, b); };
  static constexpr auto kSum = [](auto a, const auto& b) __attribute__((always_inline)) { return a += b; };

  // Whether the pass of the maximum stores elements where terms will be, so that the mask is read once.
  template <bool kKeep>
  static constexpr bool kStoresElements = kKeep && kMasked;

  // A state is in the first members.
  static JAX_SOFTMAX_INLINE State state_in(const States<T>& states) {
    State state;
    std::memcpy(&state, states.member, sizeof(state));
    return state;
  }
  static JAX_SOFTMAX_INLINE void set(States<T>* states, const State& state) {
    static_assert(sizeof(state) <= sizeof(States<T>));
    std::memcpy(states->member, &state, sizeof(state));
  }

  static void identity(States<T>* states, int64_t n) {
    for (int64_t i = 0; i < n; ++i) set(&states[i], jax_softmax::identity<Op, M>());
  }
  static void combine(States<T>* states, const States<T>* later, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      set(&states[i], jax_softmax::combine<Op, M>(state_in(states[i]), state_in(later[i])));
    }
  }
  static void row_results(const States<T>* states, int64_t n, States<T>* results) {
    for (int64_t i = 0; i < n; ++i) Op::row_results(state_in(states[i]), results[i].member);
  }

  // What `finish` takes of a vector of rows.
  static JAX_SOFTMAX_INLINE typename Op::Finished finished_of(const States<T>& states) {
    if constexpr (kFinishTakesNumbers) {
      typename Op::Finished finished;
      std::memcpy(&finished, states.member, sizeof(finished));
      return finished;
    } else {
      return Op::finished(state_in(states));
    }
  }
  static void take_numbers(States<T>* states, const Numbers<T>* numbers, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const auto finished = Op::finished(state_in(states[i]), numbers[i].number);
      static_assert(sizeof(finished) <= sizeof(States<T>));
      std::memcpy(states[i].member, &finished, sizeof(finished));
    }
  }
  static void finish_labels(const States<T>& states, const Numbers<T>& numbers, const T* in, const bool* counts,
                            void* out) {
    const C x = Convert<T>::load(in);
    const C result = M::select(M::true_lanes(counts, kLanes), Op::finish(finished_of(states), &x), Op::masked());
    Convert<Out>::store(static_cast<Out*>(out), result + numbers.number[Op::kRowNumbers - 1]);
  }

  // ---- Vectors of n neighbouring elements of a block. n = AllLanes is compiled apart from fewer elements.

  using AllLanes = std::integral_constant<int, kLanes>;
  template <class N>
  static constexpr bool kWhole = std::is_same_v<N, AllLanes>;

  static JAX_SOFTMAX_INLINE Offsets offsets_of(const Block<T>& block, int64_t line, int64_t i) {
    return {line * block.stride + i, line * block.mask_stride + i * block.mask_inner_stride};
  }

  static JAX_SOFTMAX_INLINE typename M::IntValue unmasked(const Block<T>& block, Offsets offsets, int n) {
    if (block.mask_inner_stride == 0)
      return typename M::IntValue{} - static_cast<typename M::Int>(block.mask[offsets.mask]);
    return M::true_lanes(block.mask + offsets.mask, n);
  }

  // Lanes from n on, and masked ones, have the operator's pad.
  template <class N>
  static JAX_SOFTMAX_INLINE C load(const Block<T>& block, int k, Offsets offsets, N n) {
    const T* const p = block.in[k] + offsets.element;
    C v;
    if constexpr (kWhole<N>) {
      v = Convert<T>::load(p);
    } else {
      v = M::select(M::first_lanes(n), Convert<T>::load_first(p, n), Op::pad(k));
    }
    if constexpr (kMasked) v = M::select(unmasked(block, offsets, n), v, Op::pad(k));
    return v;
  }
  // Of a row, or of a vector of rows: their pivots, and their numbers if terms take them.
  static JAX_SOFTMAX_INLINE Terms terms_of(C pivot, const C* numbers) {
    const Relative<M> relative(pivot);
    if constexpr (kTermsTakeNumbers) {
      return Op::terms(relative, numbers);
    } else {
      return relative;
    }
  }
  // `terms`: the offset of the vector's terms or, if they are stored, of its elements, which terms will overwrite.
  template <bool kStored, class N>
  static JAX_SOFTMAX_INLINE Sum term(const Terms& of_row, const Block<T>& block, int64_t terms, Offsets offsets, N n) {
    C in[2];
    if constexpr (kStored) {
      in[0] = M::load(block.terms + terms);
    } else {
      for (int k = Op::kFirstSummed; k < Op::kInputs; ++k) in[k] = load(block, k, offsets, n);
    }
    return Op::term(of_row, in);
  }
  template <class N>
  static JAX_SOFTMAX_INLINE void store(const Block<T>& block, C result, Offsets offsets, N n) {
    if constexpr (kMasked) result = M::select(unmasked(block, offsets, n), result, Op::masked());
    Out* const p = static_cast<Out*>(block.out) + offsets.element;
    if constexpr (kWhole<N>) {
      Convert<Out>::store(p, result);
    } else {
      Convert<Out>::store_first(p, result, n);
    }
  }
  // `terms`: the offset of the vector's terms, if they were kept.
  template <bool kKept, class N>
  static JAX_SOFTMAX_INLINE C result(const typename Op::Finished& row, const Block<T>& block, int64_t terms,
                                     Offsets offsets, N n) {
    if constexpr (kKept) {
      return M::load(block.terms + terms) * row.scale;
    } else {
      C in[2];
      for (int k = 0; k < Op::kInputs; ++k) in[k] = load(block, k, offsets, n);
      return Op::finish(row, in);
    }
  }

  // ---- Lanes along rows. As many rows as there are lanes are reduced together.

  // Independent accumulators of quick operations, which would wait for one another in a single one.
  static constexpr int kChains = 4;
  static constexpr int kTermChains = Op::kHasPivot ? 1 : kChains;

  // Calls body(i, n, chain) for vectors of n elements from element i on, in turns for each of kCount chains.
  template <int kCount, class Body>
  static JAX_SOFTMAX_INLINE void for_vectors(int64_t begin, int64_t end, Body body) {
    int64_t i = begin;
    if constexpr (kCount > 1) {
      for (; i + kCount * kLanes <= end; i += kCount * kLanes) {
        unrolled<kCount>([&](auto chain)
                             __attribute__((always_inline)) { body(i + chain * kLanes, AllLanes(), chain); });
      }
    }
    for (; i + kLanes <= end; i += kLanes) body(i, AllLanes(), 0);
    if (i < end) body(i, static_cast<int>(end - i), 0);
  }
  template <int kCount, class V, class Combine>
  static JAX_SOFTMAX_INLINE V reduce_chains(const V (&chains)[kCount], Combine f) {
    if constexpr (kCount == 1) {
      return chains[0];
    } else {
      return f(f(chains[0], chains[1]), f(chains[kCount / 2], chains[kCount - 1]));
    }
  }

  template <bool kKeep>
  static void along_accumulate(const Block<T>& block, States<T>* states) {
    const int64_t terms_stride = ceil_div(block.elements, kLanes) * kLanes;
    for (int64_t first = 0; first < block.rows; first += kLanes, ++states) {
      const int rows = static_cast<int>(std::min<int64_t>(kLanes, block.rows - first));
      State state{};
      if constexpr (Op::kHasPivot) {
        C maxima[kLanes];
        for (int r = rows; r < kLanes; ++r) maxima[r] = M::constant(0);
        for (int r = 0; r < rows; ++r) maxima[r] = largest<kKeep>(block, first + r, (first + r) * terms_stride);
        state.pivot = M::reduce_rows(maxima, kMax);
      }
      if constexpr (Op::kHasSum) {
        F pivots[kLanes];
        M::store(pivots, state.pivot);
        Sum sums[kLanes];
        for (int r = rows; r < kLanes; ++r) sums[r] = Sum{};
        for (int r = 0; r < rows; ++r) {
          C numbers[Op::kRowNumbers + 1];
          if constexpr (kTermsTakeNumbers) {
            for (int k = 0; k < Op::kRowNumbers; ++k) {
              numbers[k] = M::constant(block.numbers[first / kLanes].number[k][r]);
            }
          }
          const Terms of_row = terms_of(M::constant(pivots[r]), numbers);
          sums[r] = sum_of_terms<kKeep>(of_row, block, first + r, (first + r) * terms_stride);
        }
        state.sum = M::reduce_rows(sums, kSum);
      }
      set(states, state);
    }
  }

  template <bool kKeep>
  static JAX_SOFTMAX_INLINE C largest(const Block<T>& block, int64_t row, int64_t terms) {
    C chains[kChains];
    for (C& chain : chains) chain = Op::pad(0);
    for_vectors<kChains>(0, block.elements, [&](int64_t i, auto n, int chain) __attribute__((always_inline)) {
      const C v = load(block, 0, offsets_of(block, row, i), n);
      if constexpr (kStoresElements<kKeep>) M::store(block.terms + terms + i, v);
      chains[chain] = M::max(chains[chain], Op::pivot_candidate(v));
    });
    return reduce_chains(chains, kMax);
  }

  template <bool kKeep>
  static JAX_SOFTMAX_INLINE Sum sum_of_terms(const Terms& of_row, const Block<T>& block, int64_t row, int64_t terms) {
    Sum sum{};
    for (int64_t begin = 0, end; begin < block.elements; begin = end) {
      end = std::min(block.elements, begin + kSteps * kTermChains * kLanes);
      Sum chains[kTermChains]{};
      for_vectors<kTermChains>(begin, end, [&](int64_t i, auto n, int chain) __attribute__((always_inline)) {
        const Sum v = term<kStoresElements<kKeep>>(of_row, block, terms + i, offsets_of(block, row, i), n);
        if constexpr (kKeep) M::store(block.terms + terms + i, v);
        chains[chain] += v;
      });
      sum += reduce_chains(chains, kSum);
    }
    return sum;
  }

  template <bool kKept>
  static void along_finish(const Block<T>& block, const States<T>* states) {
    using Finished = typename Op::Finished;
    constexpr int kMembers = sizeof(Finished) / sizeof(C);
    const int64_t terms_stride = ceil_div(block.elements, kLanes) * kLanes;
    for (int64_t first = 0; first < block.rows; first += kLanes, ++states) {
      const int rows = static_cast<int>(std::min<int64_t>(kLanes, block.rows - first));
      const Finished finished = finished_of(*states);
      F members[kMembers][kLanes];
      std::memcpy(members, &finished, sizeof(Finished));
      for (int r = 0; r < rows; ++r) {
        C spread[kMembers];  // the row's members in every lane
        for (int k = 0; k < kMembers; ++k) spread[k] = M::constant(members[k][r]);
        Finished row;
        std::memcpy(&row, spread, sizeof(Finished));
        const int64_t terms = (first + r) * terms_stride;
        for_vectors<1>(0, block.elements, [&](int64_t i, auto n, int) __attribute__((always_inline)) {
          const Offsets offsets = offsets_of(block, first + r, i);
          store(block, result<kKept>(row, block, terms + i, offsets, n), offsets, n);
        });
      }
    }
  }

  // ---- Lanes across rows. kTogether elements of each vector of rows are read in turn, so that its state is loaded
  // once for all of them.

  static constexpr int kTogether = 8;

  // Calls body(t, r, end, n) for each vector t of n rows, with its elements [r, end), which are kTogether or fewer.
  template <class Body>
  static JAX_SOFTMAX_INLINE void for_elements(const Block<T>& block, int64_t begin, int64_t end, Body body) {
    for (int64_t r = begin; r < end; r += kTogether) {
      const int64_t last = std::min(end, r + kTogether), vectors = block.rows / kLanes;
      for (int64_t t = 0; t < vectors; ++t) body(t, r, last, AllLanes());
      if (block.rows % kLanes > 0) body(vectors, r, last, static_cast<int>(block.rows % kLanes));
    }
  }

  // Calls body(r) for the elements [r, end), unrolled if there are kTogether of them.
  template <bool kUnroll, class Body>
  static JAX_SOFTMAX_INLINE void for_each(int64_t r, int64_t end, Body body) {
    if (kUnroll && end - r == kTogether) {
      if constexpr (kUnroll) unrolled<kTogether>([&](auto u) __attribute__((always_inline)) { body(r + u); });
    } else {
      for (; r < end; ++r) body(r);
    }
  }

  template <bool kKeep>
  static void across_accumulate(const Block<T>& block, States<T>* states) {
    const int64_t vectors = ceil_div(block.rows, kLanes);
    identity(states, vectors);
    if constexpr (Op::kHasPivot) {
      for_elements(block, 0, block.elements,
                   [&](int64_t t, int64_t r, int64_t end, auto n) __attribute__((always_inline)) {
                     C pivot = states[t].member[0];
                     for_each<kWhole<decltype(n)>>(r, end, [&](int64_t r) __attribute__((always_inline)) {
                       const C v = load(block, 0, offsets_of(block, r, t * kLanes), n);
                       if constexpr (kStoresElements<kKeep>) M::store(block.terms + (r * vectors + t) * kLanes, v);
                       pivot = M::max(pivot, Op::pivot_candidate(v));
                     });
                     states[t].member[0] = pivot;
                   });
    }
    if constexpr (!Op::kHasSum) return;
    Sum sums[kMostVectors];
    for (int64_t begin = 0, end; begin < block.elements; begin = end) {
      end = std::min(block.elements, begin + kSteps * kTogether);
      std::fill_n(sums, vectors, Sum{});
      for_elements(block, begin, end, [&](int64_t t, int64_t r, int64_t end, auto n) __attribute__((always_inline)) {
        const Terms of_rows = terms_of(states[t].member[0], kTermsTakeNumbers ? block.numbers[t].number : nullptr);
        Sum sum{};
        for_each<(kKeep || !Op::kHasPivot) && kWhole<decltype(n)>>(
            r, end, [&](int64_t r) __attribute__((always_inline)) {
              const int64_t terms = (r * vectors + t) * kLanes;
              const Sum v = term<kStoresElements<kKeep>>(of_rows, block, terms, offsets_of(block, r, t * kLanes), n);
              if constexpr (kKeep) M::store(block.terms + terms, v);
              sum += v;
            });
        sums[t] += sum;
      });
      for (int64_t t = 0; t < vectors; ++t) {
        State state = state_in(states[t]);
        state.sum += sums[t];
        set(&states[t], state);
      }
    }
  }

  template <bool kKept>
  static void across_finish(const Block<T>& block, const States<T>* states) {
    const int64_t vectors = ceil_div(block.rows, kLanes);
    typename Op::Finished rows[kMostVectors];
    for (int64_t t = 0; t < vectors; ++t) rows[t] = finished_of(states[t]);
    for (int64_t r = 0; r < block.elements; ++r) {
      const auto finish = [&](int64_t t, auto n) __attribute__((always_inline)) {
        const int64_t terms = (r * vectors + t) * kLanes;
        const Offsets offsets = offsets_of(block, r, t * kLanes);
        store(block, result<kKept>(rows[t], block, terms, offsets, n), offsets, n);
      };
      for (int64_t t = 0; t < block.rows / kLanes; ++t) finish(t, AllLanes());
      if (block.rows % kLanes > 0) finish(vectors - 1, static_cast<int>(block.rows % kLanes));
    }
  }
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
