// The operators: what a row accumulates and what an element becomes, and nothing about where a row lives.
//
// Each operator is a struct with the same members, so that every schedule can run every operator. `in` points at one
// element of each operand.
//
//   kInputs            how many operands of one shape there are
//   kHasPivot          whether terms are relative to a pivot, the maximum of the row's first operand that is not NaN
//   kMagnitudePivot    whether the pivot is the maximum of |x|; pivot_candidate(x) is x or |x|
//   kHasSum            whether terms are summed; if not, the sum is 0
//   Sum                the type of a row's sum: C, or a struct of several (state.h)
//   term(terms, in)    what an element adds to the sum; `terms` is a Terms
//   Terms              Relative, made of the pivot; or, with a row's numbers, what terms(relative, numbers) is
//   kFirstSummed       terms read no operand before this one
//   pad(k)             the value of operand k beyond the row's end, and of masked elements: it changes no sum or pivot
//   masked()           the result of a masked element
//   finished(state)    what `finish` takes, made of the (pivot, sum) of a whole row
//   finish(row, in)    the result of an element
//   kResultIsScaledTerm  whether that is the element's term times term_scale(state, pivot), so that terms may be kept.
//                      `pivot` is the one they are relative to; for the state's own the factor is finished(state).scale
//   kElementResults    whether elements have results
//   kWithinRange       whether no result is beyond the largest finite number of the results' type
//   kRowResults        how many results a row has; row_results(state, to) sets them
//   kRowNumbers        how many numbers of each row the operator takes: `finished`, `term_scale` and `terms` read them
//   kKeepsInfinity     whether the sum of a row that has +inf is +inf, and not NaN
//   kReadsLabelElement whether row_results takes the element at the row's label, the number of one of its elements
//   kAddsAtLabel       whether a row may have a label, and the last of the row's numbers is added to the result of the
//                      element there. A row whose numbers are all 0 has results of 0
//
// A policy M is the arithmetic: M::Value is a scalar in CUDA and a SIMD vector on the CPU.
//
// Where a pivot is infinite: `term` is given a Relative whose pivot is 0 instead of -inf and, with kKeepsInfinity, of
// +inf. Without kKeepsInfinity x - pivot is NaN at an element of +inf, and -inf elsewhere.
//
// Who carries NaN: the maximum ignores it, so a pivot is NaN only where the policy's `max` keeps it (AbsmaxScale's).
// The exponential of a NaN makes the sum NaN. A term without one has to be NaN itself where an element is.
//
// The linear maps are J t = y (t - sum(y t)) for softmax, J t = t - sum(exp(y) t) for log-softmax.
#pragma once

#include "state.h"

namespace jax_softmax {

// The defaults of an operator's members.
template <class M>
struct OperatorBase {
  using Policy = M;
  using C = typename M::Value;
  using Sum = C;
  using Terms = Relative<M>;
  struct Scale {};
  static constexpr int kInputs = 1, kFirstSummed = 0, kRowResults = 0, kRowNumbers = 0;
  static constexpr bool kHasPivot = true, kHasSum = true, kElementResults = true;
  static constexpr bool kMagnitudePivot = false, kResultIsScaledTerm = false, kWithinRange = false;
  static constexpr bool kReadsLabelElement = false, kAddsAtLabel = false, kKeepsInfinity = false;

  // Stands in for an element that is masked or lies beyond the row's end.
  static JAX_SOFTMAX_INLINE C pad(int) { return M::constant(0); }
  static JAX_SOFTMAX_INLINE C masked() { return M::constant(0); }
  static JAX_SOFTMAX_INLINE C pivot_candidate(C x) { return x; }
};

template <class M>
struct SoftmaxBase : OperatorBase<M> {
  using C = typename M::Value;
  static JAX_SOFTMAX_INLINE C pad(int) { return M::constant(-M::kInfinity); }
  static JAX_SOFTMAX_INLINE C term(const Relative<M>& relative, const C* in) { return relative.exp(in[0]); }
};

template <class M>
struct Softmax : SoftmaxBase<M> {
  using C = typename M::Value;
  // An element's result is its term times a factor of the row, so a schedule may keep the terms.
  static constexpr bool kResultIsScaledTerm = true;

  using Scale = decltype(Relative<M>::divide(C(), C()));
  struct Finished {
    Relative<M> relative;
    Scale scale;
  };
  static JAX_SOFTMAX_INLINE Finished finished(State<C> s) {
    return {Relative<M>(s.pivot), Relative<M>::divide(M::constant(1), s.sum)};
  }
  static JAX_SOFTMAX_INLINE C finish(const Finished& row, const C* in) { return row.relative.exp(in[0]) * row.scale; }
  // The factor for terms that were taken relative to `term_pivot`.
  static JAX_SOFTMAX_INLINE Scale term_scale(State<C> s, C term_pivot) {
    return Relative<M>::divide(Relative<M>(s.pivot).rescale(term_pivot), s.sum);
  }
};

template <class M>
struct LogSoftmax : SoftmaxBase<M> {
  using C = typename M::Value;
  struct Finished {
    C pivot;
    C log_sum;
  };
  static JAX_SOFTMAX_INLINE C masked() { return M::constant(-M::kInfinity); }
  static JAX_SOFTMAX_INLINE Finished finished(State<C> s) { return {s.pivot, Relative<M>(s.pivot).log(s.sum)}; }
  static JAX_SOFTMAX_INLINE C finish(const Finished& row, const C* in) { return (in[0] - row.pivot) - row.log_sum; }
};

// Operators that have results of rows alone.
template <class M>
struct RowResultsOnly : SoftmaxBase<M> {
  using C = typename M::Value;
  static constexpr bool kElementResults = false;
  struct Finished {};

  template <class... Given>
  static JAX_SOFTMAX_INLINE Finished finished(const Given&...) {
    return {};
  }
  static JAX_SOFTMAX_INLINE C finish(const Finished&, const C*) { return M::constant(0); }
};

// The two numbers of a row's log-sum-exp: its maximum, and the sum of exp(x - maximum), or of exp(x) where the maximum
// is infinite.
template <class M>
struct LogSumExp : RowResultsOnly<M> {
  using C = typename M::Value;
  static constexpr bool kKeepsInfinity = true;
  static constexpr int kRowResults = 2;

  static JAX_SOFTMAX_INLINE void row_results(State<C> s, C* to) {
    to[0] = s.pivot;
    to[1] = Relative<M>(s.pivot).whole(s.sum);
  }
};

// Softmax, and the results of LogSumExp.
template <class M>
struct SoftmaxAndNormalizer : Softmax<M> {
  static constexpr int kRowResults = 2;
  static JAX_SOFTMAX_INLINE void row_results(State<typename M::Value> s, typename M::Value* to) {
    LogSumExp<M>::row_results(s, to);
  }
};

// The cross entropy of a row and its label, log(sum) - (x[label] - maximum), or 0 of a row without one; and the results
// of LogSumExp: as two numbers they keep digits that their log-sum-exp would lose where the maximum is large.
template <class M>
struct CrossEntropy : RowResultsOnly<M> {
  using C = typename M::Value;
  static constexpr bool kKeepsInfinity = true, kReadsLabelElement = true;
  static constexpr int kRowResults = 3;

  template <class Truth>
  static JAX_SOFTMAX_INLINE void row_results(State<C> s, Truth has_label, C labelled, C* to) {
    const Relative<M> relative(s.pivot);
    const C loss = relative.log(s.sum) - (labelled - relative.pivot_of(s.pivot));
    to[0] = M::select(has_label, loss, M::constant(0));
    LogSumExp<M>::row_results(s, to + 1);
  }
};

// The gradient of a cross entropy: softmax(x) (a + b lse) + c, and d more at the label. a, b, c and d are the row's
// numbers, and lse is its log-sum-exp. Where all four are 0, the row does not count: its gradient is 0 even where x is
// NaN. The results of rows are those of LogSumExp.
template <class M>
struct CrossEntropyGradient : SoftmaxBase<M> {
  using C = typename M::Value;
  static constexpr bool kResultIsScaledTerm = true, kKeepsInfinity = true, kAddsAtLabel = true;
  static constexpr int kRowResults = 2, kRowNumbers = 4;

  struct Scale {
    C factor;
    C addend;
    friend JAX_SOFTMAX_INLINE C operator*(C term, const Scale& s) { return M::multiply_add(term, s.factor, s.addend); }
  };
  struct Finished {
    Relative<M> relative;
    Scale scale;
  };
  static JAX_SOFTMAX_INLINE void row_results(State<C> s, C* to) { LogSumExp<M>::row_results(s, to); }
  static JAX_SOFTMAX_INLINE Finished finished(State<C> s, const C* numbers) {
    return {Relative<M>(s.pivot), term_scale(s, s.pivot, numbers)};
  }
  static JAX_SOFTMAX_INLINE C finish(const Finished& row, const C* in) { return row.relative.exp(in[0]) * row.scale; }
  static JAX_SOFTMAX_INLINE Scale term_scale(State<C> s, C term_pivot, const C* numbers) {
    const Relative<M> relative(s.pivot);
    const C lse = relative.pivot_of(s.pivot) + relative.log(s.sum);
    // NaN if the sum is infinity.
    return {((numbers[0] + numbers[1] * lse) * relative.rescale(term_pivot) + (s.sum - s.sum)) / s.sum, numbers[2]};
  }
};

// The operator Base, with two results more of each row: the sum of x - maximum over the elements where that is not
// minus infinity, and their number. An infinite maximum counts as 0.
template <class Base>
struct AndDistances : Base {
  using M = typename Base::Policy;
  using C = typename Base::C;
  using Sum = Distances<C>;
  static constexpr bool kResultIsScaledTerm = false;
  static constexpr int kRowResults = Base::kRowResults + 2;

  static JAX_SOFTMAX_INLINE Sum term(const Relative<M>& relative, const C* in) {
    const C distance = in[0] - relative.pivot, zero = M::constant(0);
    const auto excluded = M::equal(distance, M::constant(-M::kInfinity));
    return {Base::term(relative, in), M::select(excluded, zero, distance), M::select(excluded, zero, M::constant(1))};
  }
  template <class... Given>
  static JAX_SOFTMAX_INLINE auto finished(const State<C, Sum>& s, const Given&... given) {
    return Base::finished(State<C>{s.pivot, s.sum.sum}, given...);
  }
  static JAX_SOFTMAX_INLINE void row_results(const State<C, Sum>& s, C* to) {
    Base::row_results(State<C>{s.pivot, s.sum.sum}, to);
    to[Base::kRowResults] = s.sum.distance;
    to[Base::kRowResults + 1] = s.sum.count;
  }
};
template <class M>
struct LogSumExpAndDistances : AndDistances<LogSumExp<M>> {};
template <class M>
struct CrossEntropyGradientAndDistances : AndDistances<CrossEntropyGradient<M>> {};

// The entropy of softmax(x) over a row, the maximum, and the sum of exp(x - maximum). Of log S - T / S both terms are
// at least 0, so nothing cancels. Where S is 0 the entropy is 0: of a row that is masked altogether, or has nothing but
// -inf.
template <class M>
struct Entropy : RowResultsOnly<M> {
  using C = typename M::Value;
  using Sum = Moments<C>;
  static constexpr int kRowResults = 3;

  static JAX_SOFTMAX_INLINE Sum term(const Relative<M>& relative, const C* in) {
    return moments(relative.exp(in[0]), in[0] - relative.pivot);
  }
  static JAX_SOFTMAX_INLINE void row_results(State<C, Sum> s, C* to) {
    const Relative<M> relative(s.pivot);
    const C nothing = M::constant(0), entropy = relative.log(s.sum.sum) - s.sum.moment / s.sum.sum;
    to[0] = M::select(M::equal(s.sum.sum, nothing), nothing, entropy);
    to[1] = s.pivot;
    to[2] = relative.whole(s.sum.sum);
  }

 protected:
  static JAX_SOFTMAX_INLINE Sum moments(C exponential, C distance) {
    const C nothing = M::constant(0);
    return {exponential, M::select(M::equal(exponential, nothing), nothing, exponential * distance)};
  }
};

// KL(softmax(x) || softmax(y)) of a row, and the maximum and the sum of x. The row's numbers are y's maximum and the
// logarithm of y's sum.
template <class M>
struct KlDivergence : Entropy<M> {
  using C = typename M::Value;
  using Sum = Moments<C>;
  static constexpr int kInputs = 2, kRowNumbers = 2;
  struct Terms {
    Relative<M> relative;
    C largest, log_sum;  // of y
  };

  static JAX_SOFTMAX_INLINE C pad(int k) { return M::constant(k == 0 ? -M::kInfinity : 0); }
  static JAX_SOFTMAX_INLINE Terms terms(const Relative<M>& relative, const C* numbers) {
    return {relative, numbers[0], numbers[1]};
  }
  static JAX_SOFTMAX_INLINE Sum term(const Terms& terms, const C* in) {
    const Relative<M>& relative = terms.relative;
    const C log_q = (in[1] - terms.largest) - terms.log_sum;
    return Entropy<M>::moments(relative.exp(in[0]), (in[0] - relative.pivot) - log_q);
  }
  static JAX_SOFTMAX_INLINE void row_results(State<C, Sum> s, C* to) {
    Entropy<M>::row_results(s, to);
    to[0] = -to[0];
  }
};

// x / absmax, where absmax is the row's maximum of |x|; for results of 8 bits, x scaled so that absmax becomes their
// type's largest number. A row's result is the scale that takes results back to x. Its policy, ScaledTo, knows the
// results' type; NaNs are carried by the pivot, and nothing is summed.
template <class M>
struct AbsmaxScale : OperatorBase<M> {
  using C = typename M::Value;
  static constexpr bool kMagnitudePivot = true, kHasSum = false, kWithinRange = true;
  static constexpr int kRowResults = 1;
  using Finished = typename M::Scaler;

  static JAX_SOFTMAX_INLINE C pivot_candidate(C x) { return M::abs(x); }
  static JAX_SOFTMAX_INLINE C term(const Relative<M>&, const C*) { return M::constant(0); }
  static JAX_SOFTMAX_INLINE Finished finished(State<C> s) { return Finished(s.pivot); }
  static JAX_SOFTMAX_INLINE C finish(const Finished& row, const C* in) { return in[0] * row; }
  static JAX_SOFTMAX_INLINE void row_results(State<C> s, C* to) { to[0] = M::scale(s.pivot); }
};

template <class C>
struct SumOfRow {
  C sum;
};

template <class M>
struct LinearBase : OperatorBase<M> {
  using C = typename M::Value;
  static constexpr int kInputs = 2;  // the operator's result y and the (co)tangent t
  static constexpr bool kHasPivot = false;
  using Finished = SumOfRow<C>;
  static JAX_SOFTMAX_INLINE Finished finished(State<C> s) { return {s.sum}; }
};

// Softmax's Jacobian, which is symmetric: both its JVP and its VJP.
template <class M>
struct SoftmaxLinear : LinearBase<M> {
  using C = typename M::Value;
  static JAX_SOFTMAX_INLINE C term(const Relative<M>&, const C* in) { return in[0] * in[1]; }
  static JAX_SOFTMAX_INLINE C finish(const SumOfRow<C>& row, const C* in) { return in[0] * (in[1] - row.sum); }
};

// Log-softmax's Jacobian and its transpose, given y = log_softmax(x).
template <class M>
struct LogSoftmaxJvp : LinearBase<M> {
  using C = typename M::Value;
  static JAX_SOFTMAX_INLINE C term(const Relative<M>&, const C* in) { return M::exp(in[0]) * in[1]; }
  static JAX_SOFTMAX_INLINE C finish(const SumOfRow<C>& row, const C* in) { return in[1] - row.sum; }
};

template <class M>
struct LogSoftmaxVjp : LinearBase<M> {
  using C = typename M::Value;
  static constexpr int kFirstSummed = 1;
  static JAX_SOFTMAX_INLINE C term(const Relative<M>&, const C* in) { return in[1]; }
  static JAX_SOFTMAX_INLINE C finish(const SumOfRow<C>& row, const C* in) { return in[1] - M::exp(in[0]) * row.sum; }
};

// Softmax's and log-softmax's linear maps J t given x, in one pass: softmax's Jacobian is p (t - sum(p t)), and
// log-softmax's transposed t - p sum(t), where p = softmax(x). The sum of exp(x - pivot) t is divided by that of
// exp(x - pivot) in the end: it overflows where n elements of a row have |t| > 3e38 / n.
template <class M, bool kWeighted>
struct GradientBase : OperatorBase<M> {
  using C = typename M::Value;
  using Sum = SumAndTotal<C, kWeighted>;
  static constexpr int kInputs = 2;  // x and the (co)tangent t
  struct Finished {
    Relative<M> relative;
    decltype(Relative<M>::divide(C(), C())) inverse;
    C total;
  };
  static JAX_SOFTMAX_INLINE C pad(int k) { return M::constant(k == 0 ? -M::kInfinity : 0); }
  static JAX_SOFTMAX_INLINE Sum term(const Relative<M>& relative, const C* in) {
    const C e = relative.exp(in[0]);
    return {e, kWeighted ? e * in[1] : in[1]};
  }
  static JAX_SOFTMAX_INLINE Finished finished(const State<C, Sum>& s) {
    return {Relative<M>(s.pivot), Relative<M>::divide(M::constant(1), s.sum.sum),
            kWeighted ? s.sum.total / s.sum.sum : s.sum.total};
  }
  static JAX_SOFTMAX_INLINE C finish(const Finished& row, const C* in) {
    const C p = row.relative.exp(in[0]) * row.inverse;
    return kWeighted ? p * (in[1] - row.total) : in[1] - p * row.total;
  }
};
template <class M>
struct SoftmaxGradient : GradientBase<M, true> {};
template <class M>
struct LogSoftmaxGradient : GradientBase<M, false> {};

}  // namespace jax_softmax
