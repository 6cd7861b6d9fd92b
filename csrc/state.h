// The state of a row, (pivot, sum), and how states are combined. M is the arithmetic: see ops.h. The combination is
// Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
//
// The states of a row's parts are combined in any grouping, so they have to be a commutative monoid, but for rounding:
//
//   - `+=` combines two sums of one pivot, by operators and `?:` alone, which vectors have as well.
//   - rescaled(sum, relative, from) takes a sum from its pivot `from` to that of `relative`, which is not smaller.
//     `from` may be -inf, which counts as 0 in relative.pivot: compare shielded(from).
//   - The neutral element is a Sum of zeros, with the pivot -inf, or 0 if there is none. Rescaled, zeros stay zeros.
//
// A Sum that is a struct has members of type C alone, and is moved between threads and blocks as an array of them. It
// need not be a sum: `+=` may give a maximum, with a member that is 0 as long as there is no element.
#pragma once

#ifdef __CUDACC__
#define JAX_SOFTMAX_INLINE __host__ __device__ __forceinline__
#else
#define JAX_SOFTMAX_INLINE inline __attribute__((always_inline))
#endif

namespace jax_softmax {

// The state of a row, or of a part of one. The pivot of an operator without one is 0.
template <class C, class Sum = C>
struct State {
  C pivot;
  Sum sum;
};
template <class Op>
using StateOf = State<typename Op::C, typename Op::Sum>;

// sum e and sum e (x - pivot - y), where e = exp(x - pivot) and y is 0 or another operand. An element whose e is 0 adds
// 0 to both, whatever x and y are.
template <class C>
struct alignas(sizeof(C) < 8 ? 8 : alignof(C)) Moments {
  C sum;
  C moment;
  JAX_SOFTMAX_INLINE Moments& operator+=(const Moments& other) {
    sum += other.sum;
    moment += other.moment;
    return *this;
  }
};

// sum exp(x - pivot); and sum (x - pivot) and the count of the elements other than -inf, which masked elements and
// those beyond the row's end are.
template <class C>
struct Distances {
  C sum;
  C distance;
  C count;
  JAX_SOFTMAX_INLINE Distances& operator+=(const Distances& other) {
    sum += other.sum;
    distance += other.distance;
    count += other.count;
    return *this;
  }
};

// sum e and sum e y, or sum e and sum y, where e = exp(x - pivot) and y is another operand.
template <class C, bool kWeighted>
struct alignas(sizeof(C) < 8 ? 8 : alignof(C)) SumAndTotal {
  C sum;
  C total;
  JAX_SOFTMAX_INLINE SumAndTotal& operator+=(const SumAndTotal& other) {
    sum += other.sum;
    total += other.total;
    return *this;
  }
};

// A pivot of -inf (no element so far, or none but -inf) counts as 0: terms are then 0 and not NaN, and a row of -inf
// has a sum of 0, of which `finished` makes NaN.
template <class M>
JAX_SOFTMAX_INLINE typename M::Value shielded(typename M::Value pivot) {
  return M::select(M::equal(pivot, M::constant(-M::kInfinity)), M::constant(0), pivot);
}

// Computes terms exp(x - pivot). A policy may specialize it; terms may then have a factor that all terms of one pivot
// share, and there may be no member `pivot`: there is none in CUDA's for Softmax of float32 and for AbsmaxScale.
template <class M>
struct Relative {
  using C = typename M::Value;
  C pivot;

  Relative() = default;
  explicit JAX_SOFTMAX_INLINE Relative(C unshielded) : pivot(shielded<M>(unshielded)) {}
  JAX_SOFTMAX_INLINE C exp(C x) const { return M::exp_from_pivot(x - pivot); }
  // log(sum exp(x - pivot)), given the sum of terms.
  JAX_SOFTMAX_INLINE C log(C sum) const { return M::log(sum); }
  // sum exp(x - pivot), given the sum of terms.
  JAX_SOFTMAX_INLINE C whole(C sum) const { return sum; }
  // The factor that makes terms relative to a pivot `from` <= pivot relative to this one.
  JAX_SOFTMAX_INLINE C rescale(C from) const { return M::exp_from_pivot(from - pivot); }
  // x / sum, as a number or as a type that a term can be multiplied by.
  static JAX_SOFTMAX_INLINE C divide(C x, C sum) { return x / sum; }
};

// The policy M, but a pivot of +inf counts as 0 too: the sum of a row that has +inf is +inf, and not NaN.
template <class M>
struct KeepingInfinity : M {};

template <class M>
struct Relative<KeepingInfinity<M>> : Relative<M> {
  using C = typename M::Value;
  Relative() = default;
  explicit JAX_SOFTMAX_INLINE Relative(C pivot) : Relative<M>(M::below_infinity(pivot)) {}
  // What the logarithm of the sum is added to.
  static JAX_SOFTMAX_INLINE C pivot_of(C pivot) { return shielded<M>(M::below_infinity(pivot)); }
  JAX_SOFTMAX_INLINE C rescale(C from) const { return Relative<M>::rescale(M::below_infinity(from)); }
};

// A sum of terms relative to a pivot `from`, which is not larger than `relative`'s, made relative to that.
template <class M>
JAX_SOFTMAX_INLINE typename M::Value rescaled(typename M::Value sum, const Relative<M>& relative,
                                              typename M::Value from) {
  return sum * relative.rescale(from);
}
template <class M>
JAX_SOFTMAX_INLINE Moments<typename M::Value> rescaled(const Moments<typename M::Value>& sums,
                                                       const Relative<M>& relative, typename M::Value from) {
  using C = typename M::Value;
  const C factor = relative.rescale(from), nothing = M::constant(0);
  const C moment = (sums.moment + sums.sum * (from - relative.pivot)) * factor;
  return {sums.sum * factor, M::select(M::equal(factor, nothing), nothing, moment)};
}

template <class M>
JAX_SOFTMAX_INLINE Distances<typename M::Value> rescaled(const Distances<typename M::Value>& sums,
                                                         const Relative<M>& relative, typename M::Value from) {
  using C = typename M::Value;
  const C nothing = M::constant(0), moved = sums.distance + sums.count * (shielded<M>(from) - relative.pivot);
  return {rescaled(sums.sum, relative, from), M::select(M::equal(sums.count, nothing), nothing, moved), sums.count};
}

template <class M, bool kWeighted>
JAX_SOFTMAX_INLINE SumAndTotal<typename M::Value, kWeighted> rescaled(
    const SumAndTotal<typename M::Value, kWeighted>& sums, const Relative<M>& relative, typename M::Value from) {
  const typename M::Value factor = relative.rescale(from);
  return {sums.sum * factor, kWeighted ? sums.total * factor : sums.total};
}

template <class Op, class M>
JAX_SOFTMAX_INLINE StateOf<Op> identity() {
  return {M::constant(Op::kHasPivot ? -M::kInfinity : 0), typename Op::Sum{}};
}

template <class Op, class M>
JAX_SOFTMAX_INLINE StateOf<Op> combine(StateOf<Op> a, StateOf<Op> b) {
  if constexpr (!Op::kHasPivot) {
    a.sum += b.sum;
    return a;
  } else {
    const typename M::Value pivot = M::max(a.pivot, b.pivot);
    const Relative<M> relative(pivot);
    auto sum = rescaled(a.sum, relative, a.pivot);
    sum += rescaled(b.sum, relative, b.pivot);
    return {pivot, sum};
  }
}

}  // namespace jax_softmax
