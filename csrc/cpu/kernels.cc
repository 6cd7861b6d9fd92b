// The CPU schedules, compiled once for each instruction set. Nothing here may be visible outside the namespace that is
// named after it but the two functions at the end.
#include "cpu/cpu.h"
#include "cpu/simd.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

struct Offset {
  int64_t element;
  int64_t mask;
};

// Where the index-th combination of the dimensions' indices lies, the innermost varying fastest.
Offset offset_of(const Dims& dims, int size, int64_t index) {
  Offset offset{0, 0};
  for (int i = size - 1; i >= 0; --i) {
    const Dim& dim = dims.dim[i];
    const int64_t rest = i == 0 ? 0 : index / dim.extent;
    const int64_t here = index - rest * dim.extent;
    offset.element += here * dim.stride;
    offset.mask += here * dim.mask_stride;
    index = rest;
  }
  return offset;
}

// Steps through the combinations of the first `size` dimensions' indices, and after the last starts anew.
class Odometer {
 public:
  Odometer(const Dims& dims, int size) : dims_(dims), size_(size) {}
  Offset offset() const { return offset_; }
  void advance() {
    for (int i = size_ - 1; i >= 0; --i) {
      const Dim& dim = dims_.dim[i];
      offset_.element += dim.stride;
      offset_.mask += dim.mask_stride;
      if (++index_[i] < dim.extent) return;
      index_[i] = 0;
      offset_.element -= dim.extent * dim.stride;
      offset_.mask -= dim.extent * dim.mask_stride;
    }
  }

 private:
  const Dims& dims_;
  int size_;
  int64_t index_[kMaxDims] = {};
  Offset offset_{0, 0};
};

// The operands as seen by one schedule: loads and stores of vectors of up to kLanes neighbouring elements.
template <template <class> class OpOf, class T, bool kMasked>
struct Access {
  using M = Simd<typename Convert<T>::Compute>;
  using C = typename M::Value;
  using Op = OpOf<M>;
  static constexpr int kLanes = M::kLanes;

  const T* in[Op::kInputs];
  const bool* mask;
  int64_t mask_stride;  // between neighbouring elements: 0 or 1
  T* out;

  Access(const Operands& operands, int64_t mask_stride)
      : mask(operands.mask), mask_stride(mask_stride), out(static_cast<T*>(operands.out)) {
    for (int k = 0; k < Op::kInputs; ++k) in[k] = static_cast<const T*>(operands.in[k]);
  }

  static JAX_SOFTMAX_INLINE typename M::IntValue first_lanes(int n) {
    typename M::IntValue lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return lane < static_cast<typename M::Int>(n);
  }

  JAX_SOFTMAX_INLINE typename M::IntValue unmasked(int64_t offset, int n) const {
    if (mask_stride == 0) return typename M::IntValue{} - static_cast<typename M::Int>(mask[offset]);
    Vector<uint8_t, kLanes> byte{};
    if (n == kLanes) {
      std::memcpy(&byte, mask + offset, kLanes);
    } else {
      std::memcpy(&byte, mask + offset, n);
    }
    return __builtin_convertvector(byte, typename M::IntValue) != 0;
  }

  // n is in [1, kLanes]; lanes from n on hold the operator's pad, as masked ones do.
  JAX_SOFTMAX_INLINE void load(C (&v)[Op::kInputs], Offset at, int n) const {
    for (int k = 0; k < Op::kInputs; ++k) {
      if (n == kLanes) {
        v[k] = Convert<T>::load(in[k] + at.element);
      } else {
        T padded[kLanes] = {};
        std::memcpy(padded, in[k] + at.element, n * sizeof(T));
        v[k] = M::select(first_lanes(n), Convert<T>::load(padded), Op::pad(k));
      }
      if constexpr (kMasked) v[k] = M::select(unmasked(at.mask, n), v[k], Op::pad(k));
    }
  }

  JAX_SOFTMAX_INLINE void store(C v, Offset at, int n) const {
    if constexpr (kMasked) v = M::select(unmasked(at.mask, n), v, Op::masked());
    if (n == kLanes) {
      Convert<T>::store(out + at.element, v);
    } else {
      T padded[kLanes];
      Convert<T>::store(padded, v);
      std::memcpy(out + at.element, padded, n * sizeof(T));
    }
  }
};

// Minor axis reduced: the lanes lie along the row, in runs of its contiguous innermost dimension. A unit is a row.
template <template <class> class OpOf, class T, bool kMasked>
struct Rows {
  using A = Access<OpOf, T, kMasked>;
  using M = typename A::M;
  using C = typename A::C;
  using Op = typename A::Op;
  static constexpr int kLanes = A::kLanes;
  static constexpr int kUnroll = 8;                         // vectors whose maximum is taken before the sum is rescaled
  static constexpr int64_t kBlock = 64 * kUnroll * kLanes;  // summed by itself, lest a long sum swallow small terms

  static constexpr int kHeld = 512;  // vectors of terms that are held between the passes, in the first cache

  static int64_t units(const View& view) { return view.rows; }

  static void run(const View& view, const Operands& operands, int64_t first_unit, int64_t last_unit) {
    const Dims& reduced = view.reduced;
    const int outer = reduced.size - 1;
    const int64_t length = reduced.dim[outer].extent;
    const int64_t runs = view.columns / length;
    const A access(operands, reduced.dim[outer].mask_stride);
    for (int64_t row = first_unit; row < last_unit; ++row) {
      const Offset base = offset_of(view.kept, view.kept.size, row);
      if constexpr (Op::kResultIsScaledTerm) {
        if (runs == 1 && length <= kHeld * kLanes) {
          hold_terms(access, base, static_cast<int>(length));
          continue;
        }
      }
      State<C> state = identity<Op, M>();
      Odometer odometer(reduced, outer);
      for (int64_t i = 0; i < runs; ++i, odometer.advance()) {
        accumulate_run(access, add(base, odometer.offset()), length, state);
      }
      if constexpr (Op::kHasPivot) {
        const C pivot = M::across_lanes(state.pivot, [](auto a, auto b) { return b > a ? b : a; });
        state.sum = state.sum * Relative<M>::rescale(state.pivot, pivot);
        state.pivot = pivot;
      }
      state.sum = M::across_lanes(state.sum, [](auto a, auto b) { return a + b; });
      const typename Op::Row finished = Op::row(state);
      for (int64_t i = 0; i < runs; ++i, odometer.advance()) {
        finish_run(access, add(base, odometer.offset()), length, finished);
      }
    }
  }

 private:
  // A short row whose result is made of its terms: they are computed once.
  static JAX_SOFTMAX_INLINE void hold_terms(const A& access, Offset base, int length) {
    C held[kHeld];
    const int vectors = (length + kLanes - 1) / kLanes;
    const int full = length / kLanes;
    // Several maxima and sums side by side: each alone would wait for the one before.
    constexpr int kChains = 8;
    C pivots[kChains], sums[kChains];
    for (int u = 0; u < kChains; ++u) pivots[u] = Op::pad(0), sums[u] = M::constant(0);
    const auto for_vectors = [&](auto body) {
      int i = 0;
      for (; i + kChains <= full; i += kChains) {
        JAX_SOFTMAX_UNROLL
        for (int u = 0; u < kChains; ++u) body(i + u, u, kLanes);
      }
      for (; i < vectors; ++i) body(i, i % kChains, lanes_left(length - i * kLanes));
    };
    for_vectors([&](int i, int chain, int n) {
      C v[Op::kInputs];
      access.load(v, along(access, base, i * kLanes), n);
      pivots[chain] = M::max(pivots[chain], v[0]);
      held[i] = v[0];
    });
    for (int u = 1; u < kChains; ++u) pivots[0] = M::max(pivots[0], pivots[u]);
    const C pivot = M::across_lanes(pivots[0], [](auto a, auto b) { return b > a ? b : a; });
    const Relative<M> relative(pivot);
    for_vectors([&](int i, int chain, int) {
      held[i] = Op::term(relative, &held[i]);
      sums[chain] = sums[chain] + held[i];
    });
    for (int u = 1; u < kChains; ++u) sums[0] = sums[0] + sums[u];
    const C scale = Op::row({pivot, M::across_lanes(sums[0], [](auto a, auto b) { return a + b; })}).scale;
    for_vectors([&](int i, int, int n) { access.store(held[i] * scale, along(access, base, i * kLanes), n); });
  }

  static Offset add(Offset a, Offset b) { return {a.element + b.element, a.mask + b.mask}; }

  static JAX_SOFTMAX_INLINE Offset along(const A& access, Offset base, int64_t i) {
    return {base.element + i, base.mask + i * access.mask_stride};
  }

  static JAX_SOFTMAX_INLINE void accumulate_run(const A& access, Offset base, int64_t length, State<C>& state) {
    if (length <= kBlock) return accumulate_block(access, base, 0, length, state);
    for (int64_t begin = 0; begin < length; begin += kBlock) {
      State<C> block = identity<Op, M>();
      accumulate_block(access, base, begin, length - begin < kBlock ? length : begin + kBlock, block);
      state = combine<Op, M>(state, block);
    }
  }

  static JAX_SOFTMAX_INLINE void accumulate_block(const A& access, Offset base, int64_t begin, int64_t end,
                                                  State<C>& state) {
    int64_t i = begin;
    for (; i + kUnroll * kLanes <= end; i += kUnroll * kLanes) {
      C v[kUnroll][Op::kInputs];
      JAX_SOFTMAX_UNROLL
      for (int u = 0; u < kUnroll; ++u) access.load(v[u], along(access, base, i + u * kLanes), kLanes);
      accumulate<Op, M>(state, v);
    }
    for (; i < end; i += kLanes) {
      C v[1][Op::kInputs];
      access.load(v[0], along(access, base, i), lanes_left(end - i));
      accumulate<Op, M>(state, v);
    }
  }

  static JAX_SOFTMAX_INLINE void finish_run(const A& access, Offset base, int64_t length,
                                            const typename Op::Row& finished) {
    int64_t i = 0;
    for (; i + kLanes <= length; i += kLanes) finish_vector(access, along(access, base, i), kLanes, finished);
    if (i < length) finish_vector(access, along(access, base, i), static_cast<int>(length - i), finished);
  }

  static JAX_SOFTMAX_INLINE void finish_vector(const A& access, Offset at, int n, const typename Op::Row& finished) {
    C v[Op::kInputs];
    access.load(v, at, n);
    access.store(Op::finish(finished, v), at, n);
  }

  static int lanes_left(int64_t n) { return n < kLanes ? static_cast<int>(n) : kLanes; }
};

// Minor axis kept: the lanes lie across neighbouring columns, each of which is a row of its own. A unit is a tile of
// columns, wide enough for the processor's prefetcher to see runs of memory in it.
template <template <class> class OpOf, class T, bool kMasked>
struct Columns {
  using A = Access<OpOf, T, kMasked>;
  using M = typename A::M;
  using C = typename A::C;
  using Op = typename A::Op;
  static constexpr int kLanes = A::kLanes;
  static constexpr int kVectors = 128;    // side by side in a tile, at most
  static constexpr int kUnroll = 8;       // elements of a column whose maximum is taken before the sum is rescaled
  static constexpr int64_t kBlock = 512;  // as in Rows, in elements of a column

  // The tile's width in columns. Where neighbouring elements of a column are close, a tile that the second cache holds
  // until it is read again; elsewhere, where they would compete for few of the cache's lines, long runs of memory.
  static int64_t tile_width(const View& view) {
    constexpr int64_t kNear = 4 << 10, kCached = 512 << 10, kFewest = 8;
    const int64_t fit = kCached / (view.columns * kLanes * static_cast<int64_t>(sizeof(T)) * Op::kInputs);
    const bool near = inner(view).extent * static_cast<int64_t>(sizeof(T)) <= kNear;
    return kLanes * (near && fit >= kFewest && fit < kVectors ? fit : kVectors);
  }
  static int64_t tiles(const View& view) { return (inner(view).extent + tile_width(view) - 1) / tile_width(view); }
  static int64_t units(const View& view) { return view.rows / inner(view).extent * tiles(view); }

  static void run(const View& view, const Operands& operands, int64_t first_unit, int64_t last_unit) {
    const A access(operands, inner(view).mask_stride);
    const int64_t width = tile_width(view), across = tiles(view);
    for (int64_t unit = first_unit; unit < last_unit; ++unit) {
      const int64_t first = unit % across * width;
      Offset base = offset_of(view.kept, view.kept.size - 1, unit / across);
      base.element += first;
      base.mask += first * access.mask_stride;
      const int64_t left = inner(view).extent - first;
      run_tile(view, access, base, static_cast<int>(left < width ? left : width));
    }
  }

 private:
  static const Dim& inner(const View& view) { return view.kept.dim[view.kept.size - 1]; }

  // `width` columns from `base` on.
  static void run_tile(const View& view, const A& access, Offset base, int width) {
    const int vectors = (width + kLanes - 1) / kLanes;
    State<C> state[kVectors];
    for (int t = 0; t < vectors; ++t) state[t] = identity<Op, M>();
    Odometer odometer(view.reduced, view.reduced.size);
    for (int64_t r = 0; r < view.columns; r += kBlock) {
      const int64_t left = view.columns - r;
      accumulate_block(access, base, width, left < kBlock ? left : kBlock, odometer, state);
    }
    typename Op::Row finished[kVectors];
    for (int t = 0; t < vectors; ++t) finished[t] = Op::row(state[t]);
    for (int64_t r = 0; r < view.columns; ++r, odometer.advance()) {
      const int full = width / kLanes;
      for (int t = 0; t < full; ++t)
        finish_vector(access, across(access, base, odometer.offset(), t), kLanes, finished[t]);
      if (full < vectors) {
        finish_vector(access, across(access, base, odometer.offset(), full), width % kLanes, finished[full]);
      }
    }
  }

  static JAX_SOFTMAX_INLINE void finish_vector(const A& access, Offset at, int n, const typename Op::Row& finished) {
    C v[Op::kInputs];
    access.load(v, at, n);
    access.store(Op::finish(finished, v), at, n);
  }

  // The next `count` elements of each column.
  static void accumulate_block(const A& access, Offset base, int width, int64_t count, Odometer& odometer,
                               State<C>* state) {
    const int vectors = (width + kLanes - 1) / kLanes;
    State<C> block[kVectors];
    for (int t = 0; t < vectors; ++t) block[t] = identity<Op, M>();
    for (int64_t r = 0; r < count;) {
      Offset at[kUnroll];
      const int n = count - r < kUnroll ? static_cast<int>(count - r) : kUnroll;
      for (int u = 0; u < n; ++u, odometer.advance()) at[u] = odometer.offset();
      const int full = n == kUnroll ? width / kLanes : 0;
      for (int t = 0; t < full; ++t) accumulate_elements<kUnroll>(access, base, at, t, kLanes, block[t]);
      for (int t = full; t < vectors; ++t) {
        for (int u = 0; u < n; ++u) accumulate_elements<1>(access, base, at + u, t, lanes(width, t), block[t]);
      }
      r += n;
    }
    for (int t = 0; t < vectors; ++t) state[t] = combine<Op, M>(state[t], block[t]);
  }

  template <int n>
  static JAX_SOFTMAX_INLINE void accumulate_elements(const A& access, Offset base, const Offset* at, int t, int lanes,
                                                     State<C>& state) {
    C v[n][Op::kInputs];
    JAX_SOFTMAX_UNROLL
    for (int u = 0; u < n; ++u) access.load(v[u], across(access, base, at[u], t), lanes);
    accumulate<Op, M>(state, v);
  }

  static JAX_SOFTMAX_INLINE Offset across(const A& access, Offset base, Offset at, int t) {
    return {base.element + at.element + t * kLanes, base.mask + at.mask + t * kLanes * access.mask_stride};
  }

  static JAX_SOFTMAX_INLINE int lanes(int width, int t) {
    const int left = width - t * kLanes;
    return left < kLanes ? left : kLanes;
  }
};

template <template <class> class OpOf, class T, bool kMasked>
Kernel kernel_of_view(const View& view) {
  if (view.minor_reduced) return {Rows<OpOf, T, kMasked>::units, Rows<OpOf, T, kMasked>::run};
  return {Columns<OpOf, T, kMasked>::units, Columns<OpOf, T, kMasked>::run};
}

template <template <class> class OpOf>
Kernel kernel_of_dtype(DType dtype, const View& view) {
  switch (dtype) {
    case DType::kF16:
      return view.masked ? kernel_of_view<OpOf, Half, true>(view) : kernel_of_view<OpOf, Half, false>(view);
    case DType::kBF16:
      return view.masked ? kernel_of_view<OpOf, BFloat16, true>(view) : kernel_of_view<OpOf, BFloat16, false>(view);
    case DType::kF32:
      return view.masked ? kernel_of_view<OpOf, float, true>(view) : kernel_of_view<OpOf, float, false>(view);
    case DType::kF64:
      return view.masked ? kernel_of_view<OpOf, double, true>(view) : kernel_of_view<OpOf, double, false>(view);
  }
  __builtin_unreachable();
}

}  // namespace

Kernel kernel(Op op, DType dtype, const View& view) {
  switch (op) {
    case Op::kSoftmax:
      return kernel_of_dtype<Softmax>(dtype, view);
    case Op::kLogSoftmax:
      return kernel_of_dtype<LogSoftmax>(dtype, view);
    case Op::kSoftmaxLinear:
      return kernel_of_dtype<SoftmaxLinear>(dtype, view);
    case Op::kLogSoftmaxJvp:
      return kernel_of_dtype<LogSoftmaxJvp>(dtype, view);
    case Op::kLogSoftmaxVjp:
      return kernel_of_dtype<LogSoftmaxVjp>(dtype, view);
  }
  __builtin_unreachable();
}

}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
