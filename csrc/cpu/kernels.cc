// The CPU schedules, compiled once for each instruction set. Nothing here may be visible outside the namespace that is
// named after it but the two functions at the end.
#include <algorithm>
#include <memory>

#include "cpu/cpu.h"
#include "cpu/simd.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

struct Offset {
  int64_t element;
  int64_t mask;
};
Offset operator+(Offset a, Offset b) { return {a.element + b.element, a.mask + b.mask}; }
Offset operator*(int64_t n, const Dim& dim) { return {n * dim.stride, n * dim.mask_stride}; }

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

// Steps through the combinations of the first `size` dimensions' indices from the index-th on, and after the last
// starts anew.
class Odometer {
 public:
  Odometer(const Dims& dims, int size, int64_t index = 0) : dims_(dims), size_(size) {
    for (int i = size - 1; i >= 0 && index > 0; --i) {
      index_[i] = index % dims.dim[i].extent;
      index /= dims.dim[i].extent;
      offset_.element += index_[i] * dims.dim[i].stride;
      offset_.mask += index_[i] * dims.dim[i].mask_stride;
    }
  }
  Offset offset() const { return offset_; }
  // The next n offsets.
  template <int n>
  void next(Offset (&at)[n]) {
    if (size_ > 0 && index_[size_ - 1] + n < dims_.dim[size_ - 1].extent) {
      const Dim& inner = dims_.dim[size_ - 1];
      for (int64_t i = 0; i < n; ++i) at[i] = offset_ + i * inner;
      offset_ = offset_ + n * inner;
      index_[size_ - 1] += n;
      return;
    }
    for (int i = 0; i < n; ++i, advance()) at[i] = offset_;
  }
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
  static constexpr bool kHasMask = kMasked;

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

  // The same for the last n < kLanes elements of a run, of which others come before them: by a whole vector that ends
  // with them, whose first lanes hold the pad.
  JAX_SOFTMAX_INLINE void load_last(C (&v)[Op::kInputs], Offset at, int n) const {
    load(v, before(at, kLanes - n), kLanes);
    for (int k = 0; k < Op::kInputs; ++k) v[k] = M::select(first_lanes(kLanes - n), Op::pad(k), v[k]);
  }

  JAX_SOFTMAX_INLINE Offset before(Offset at, int n) const { return {at.element - n, at.mask - n * mask_stride}; }

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

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kUnroll = 8;                 // elements of a lane whose maximum is taken before the sum is rescaled
constexpr int64_t kHeldBytes = 512 << 10;  // what is held between the passes, in the second cache

// Runs a schedule S, which sees the view as tiles, each of one or more rows side by side in up to kVectors vectors.
// Where there are few tiles, their rows are cut into parts that different threads take: they first leave their states
// in the scratch memory, then put them together. Where there are many, a thread does the same with all parts of a tile.
// So how a row is summed up depends on its length alone.
template <class S>
struct Parts {
  using M = typename S::M;
  using Op = typename S::Op;
  using C = typename M::Value;
  static constexpr int64_t kFewTiles = 4;  // for each thread
  static constexpr int64_t kMostParts = 256;

  static int64_t part_length(const View& view) {
    if (S::holds(view)) return view.columns;
    const int64_t least = ceil_div(view.columns, kMostParts), unit = S::part_unit(view);
    return ceil_div(least, unit) * unit;
  }

  static Work work(const View& view, int64_t threads) {
    const S schedule(view, Operands{});
    const int64_t tiles = schedule.tiles(), parts = ceil_div(view.columns, part_length(view));
    if (parts == 1 || tiles >= kFewTiles * threads) return {tiles, 0};
    return {tiles * parts, tiles * parts * schedule.most_vectors() * static_cast<int64_t>(sizeof(State<C>))};
  }

  static void run(const View& view, const Operands& operands, void* scratch, bool second_phase, int64_t first_unit,
                  int64_t last_unit) {
    S schedule(view, operands);
    const int64_t length = part_length(view), parts = ceil_div(view.columns, length);
    const auto end_of = [&](int64_t part) { return part + 1 < parts ? (part + 1) * length : view.columns; };
    for (int64_t unit = first_unit; unit < last_unit; ++unit) {
      const int64_t tile = scratch ? unit / parts : unit, part = unit - tile * parts;
      scratch ? schedule.seek(tile, part * length, end_of(part)) : schedule.seek(tile, 0, view.columns);
      if constexpr (S::kHolds) {
        if (S::holds(view)) {
          schedule.run_held();
          continue;
        }
      }
      const int vectors = schedule.vectors();
      State<C> state[S::kVectors];
      for (int t = 0; t < vectors; ++t) state[t] = identity<Op, M>();
      const auto accumulate_part = [&](int64_t part, State<C>* states) {
        for (int t = 0; t < vectors; ++t) states[t] = identity<Op, M>();
        schedule.accumulate(part * length, end_of(part), states);
      };
      const auto add = [&](const State<C>* states) {
        for (int t = 0; t < vectors; ++t) state[t] = combine<Op, M>(state[t], states[t]);
      };
      if (!scratch) {
        State<C> states[S::kVectors];
        for (int64_t part = 0; part < parts; ++part) {
          accumulate_part(part, parts == 1 ? state : states);
          if (parts > 1) add(states);
        }
        schedule.finish(0, view.columns, state);
        continue;
      }
      const int64_t stride = schedule.most_vectors();
      State<C>* const kept = static_cast<State<C>*>(scratch);
      if (!second_phase) {
        accumulate_part(part, kept + unit * stride);
      } else {
        for (int64_t i = unit - part; i < unit - part + parts; ++i) add(kept + i * stride);
        schedule.finish(part * length, end_of(part), state);
      }
    }
  }
};

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

  Rows(const View& view, const Operands& operands)
      : view_(view),
        outer_(view.reduced.size - 1),
        length_(view.reduced.dim[outer_].extent),
        alternating_(alternating(view)),
        across_(alternating_ ? view.kept.dim[view.kept.size - 1] : Dim{1, 0, 0}),
        groups_(ceil_div(across_.extent, most_rows(view))),
        access_(operands, view.reduced.dim[outer_].mask_stride) {}

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
        if (length < kLanes) {
          finish_vector(at, static_cast<int>(length), finished[r]);
          continue;
        }
        for (int64_t i = 0; i < length; i += kLanes) {  // the last vector overlaps the one before
          finish_vector(along(at, std::min(i, length - kLanes)), kLanes, finished[r]);
        }
      }
    });
  }

 private:
  static constexpr auto kMaximum = [](auto a, auto b) { return b > a ? b : a; };
  static constexpr auto kSum = [](auto a, auto b) { return a + b; };

  static constexpr int64_t kTileBytes = 4 << 10, kFewBytes = 512;  // side by side in a tile, or a little more

  // Whether the innermost kept dimension lies between the two innermost reduced ones.
  static bool alternating(const View& view) {
    const int last = view.reduced.size - 1;
    return last > 0 && view.kept.size > 0 &&
           view.kept.dim[view.kept.size - 1].stride < view.reduced.dim[last - 1].stride;
  }
  static int64_t run_bytes(const View& view) {
    return view.reduced.dim[view.reduced.size - 1].extent * static_cast<int64_t>(sizeof(T));
  }
  static int64_t most_rows(const View& view) {
    const int64_t few = ceil_div(kFewBytes, run_bytes(view)), many = ceil_div(kTileBytes, run_bytes(view));
    // No more than what keeps a thread busy for a while: tiles, or parts of them, are what threads share out.
    const int64_t rows = holds(view) ? kHeldBytes / 2 / held_bytes(view) : 8 * kBlock / std::min(view.columns, kBlock);
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
  static Work work(const View& view, int64_t) { return {ceil_div(view.rows, kLanes), 0}; }

  static void run(const View& view, const Operands& operands, void*, bool, int64_t first_unit, int64_t last_unit) {
    const A access(operands, view.reduced.dim[0].mask_stride);
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

template <int first, class V, int... j>
JAX_SOFTMAX_INLINE V interleave(V a, V b, std::integer_sequence<int, j...>) {
  return __builtin_shufflevector(a, b, (first + j / 2 + j % 2 * static_cast<int>(sizeof...(j)))...);
}

// Writes to[c * to_step + r] = from[r * from_step + c] for r and c below n.
template <int n, class U>
JAX_SOFTMAX_INLINE void transpose_square(const U* from, int64_t from_step, U* to, int64_t to_step) {
  using Bits = std::conditional_t<sizeof(U) == 2, uint16_t, std::conditional_t<sizeof(U) == 4, uint32_t, uint64_t>>;
  using V = Vector<Bits, n>;
  using Lanes = std::make_integer_sequence<int, n>;
  V v[n], mixed[n];
  unrolled<n>([&](auto i) { std::memcpy(&v[i], from + i * from_step, sizeof(V)); });
  unrolled<n == 8   ? 3
           : n == 4 ? 2
                    : 1>([&](auto) {
    unrolled<n / 2>([&](auto i) {
      mixed[2 * i] = interleave<0>(v[i], v[i + n / 2], Lanes());
      mixed[2 * i + 1] = interleave<n / 2>(v[i], v[i + n / 2], Lanes());
    });
    unrolled<n>([&](auto i) { v[i] = mixed[i]; });
  });
  unrolled<n>([&](auto i) { std::memcpy(to + i * to_step, &v[i], sizeof(V)); });
}

// The same for any numbers of rows and columns, by squares as long as there is room for one. The last ones overlap
// those before.
template <int n, class U>
void transpose(const U* from, int64_t from_step, U* to, int64_t to_step, int64_t rows, int64_t columns) {
  if constexpr (n == 1 || n * sizeof(U) < 8) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) to[c * to_step + r] = from[r * from_step + c];
    }
  } else {
    if (rows < n || columns < n) return transpose<n / 2>(from, from_step, to, to_step, rows, columns);
    for (int64_t i = 0; i < rows; i += n) {
      const int64_t r = std::min(i, rows - n);
      for (int64_t j = 0; j < columns; j += n) {
        const int64_t c = std::min(j, columns - n);
        transpose_square<n>(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
      }
    }
  }
}

// A stage: elements of several rows that lie apart, moved to lie side by side as neighbouring columns do, and the
// results moved back. The rows are those of the innermost kept dimension, if that is the minor one, for each of a range
// of groups, which are the combinations of the other kept dimensions.
template <class A, class T>
class Stage {
 public:
  Stage(const View& view, const A& outside)
      : view_(view),
        outside_(outside),
        outer_(view.kept.size - !view.minor_reduced),
        inner_(view.minor_reduced ? Dim{1, 1, 0} : view.kept.dim[outer_]),
        all_groups_(view.rows / inner_.extent),
        most_groups_(std::min(all_groups_, groups_that_fit())),
        width_(ceil_div(most_groups_ * inner_.extent, A::kLanes) * A::kLanes),
        length_(view.columns * width_ <= kMostElements ? view.columns : kElements / width_ / kUnroll * kUnroll),
        contiguous_(along().stride == inner_.extent && (inner_.extent == 1 || width_ == most_groups_ * inner_.extent)),
        access_(Operands{}, 1) {
    dims_.size = 1;
    dims_.dim[0] = {length_, width_, width_};
  }

  int64_t tiles() const { return ceil_div(all_groups_, most_groups_); }
  int64_t width() const { return width_; }
  int64_t length() const { return length_; }  // elements of each row
  const Dims& dims() const { return dims_; }
  const A& access() const { return access_; }

  void seek(int64_t tile) {
    if (!elements_) allocate();
    first_group_ = tile * most_groups_;
    groups_ = std::min(most_groups_, all_groups_ - first_group_);
    loaded_begin_ = loaded_end_ = 0;
  }

  // Elements [begin, end) of the tile's rows, no more than length(), if they are not there already.
  void load(int64_t begin, int64_t end) {
    if (begin == loaded_begin_ && end == loaded_end_) return;
    loaded_begin_ = begin;
    loaded_end_ = end;
    for (int k = 0; k < A::Op::kInputs; ++k) {
      T* const inside = elements_.get() + k * length_ * width_;
      if (contiguous_) {
        for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
          transpose<kSquare>(outside_.in[k] + at.element, across().stride, inside + here, inside_step(), groups,
                             elements * inner_.extent);
        });
      } else {
        for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
          const Move from{across().stride, along().stride, inner_.stride};
          move(outside_.in[k] + at.element, from, inside + here, inside_move(), groups, elements);
        });
      }
    }
    if (A::kHasMask) {
      for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
        const Move from{across().mask_stride, along().mask_stride, inner_.mask_stride};
        move(outside_.mask + at.mask, from, mask_.get() + here, inside_move(), groups, elements);
      });
    }
  }

  void store(int64_t begin, int64_t end) {
    loaded_begin_ = loaded_end_ = 0;  // the results have taken the elements' place
    T* const inside = elements_.get();
    if (contiguous_) {
      for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
        transpose<kSquare>(inside + here, inside_step(), outside_.out + at.element, across().stride,
                           elements * inner_.extent, groups);
      });
    } else {
      for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
        const Move to{across().stride, along().stride, inner_.stride};
        move(inside + here, inside_move(), outside_.out + at.element, to, groups, elements);
      });
    }
  }

 private:
  static constexpr int64_t kElements = 2048;
  static constexpr int64_t kMostElements = kHeldBytes / static_cast<int64_t>(sizeof(T)) / A::Op::kInputs;
  static constexpr int64_t kWidth = 64;
  static constexpr int kSquare = 16 / sizeof(T);
  // Distances between neighbouring groups, elements and innermost kept elements.
  struct Move {
    int64_t group, element, inner;
  };

  const Dim& along() const { return view_.reduced.dim[view_.reduced.size - 1]; }
  Dim across() const { return outer_ > 0 ? view_.kept.dim[outer_ - 1] : Dim{1, 0, 0}; }
  int64_t inside_step() const { return inner_.extent == 1 ? width_ : most_groups_; }
  Move inside_move() const { return {1, width_, most_groups_}; }

  // As many as make a stage wide enough; whole vectors of them.
  int64_t groups_that_fit() const {
    const int64_t fit = std::max(kWidth, kElements / std::max<int64_t>(view_.columns, kUnroll)) / inner_.extent;
    return std::max<int64_t>(1, fit / A::kLanes) * A::kLanes;
  }

  void allocate() {
    elements_.reset(new T[A::Op::kInputs * length_ * width_]());
    if (A::kHasMask) mask_.reset(new bool[length_ * width_]());
    T* const second = elements_.get() + (A::Op::kInputs - 1) * length_ * width_;
    access_ = A(Operands{{elements_.get(), second}, mask_.get(), elements_.get()}, 1);
  }

  // The elements [begin, end) of the tile's rows, in pieces in which groups and elements each follow a dimension.
  template <class Body>
  JAX_SOFTMAX_INLINE void for_rectangles(int64_t begin, int64_t end, Body body) const {
    Odometer elements(view_.reduced, view_.reduced.size - 1, begin / along().extent);
    int64_t index = begin % along().extent;
    for (int64_t r = begin; r < end; elements.advance(), index = 0) {
      const int64_t n = std::min(end - r, along().extent - index);
      Odometer groups(view_.kept, std::max(outer_ - 1, 0), first_group_ / across().extent);
      int64_t first = first_group_ % across().extent;
      for (int64_t g = 0; g < groups_; groups.advance(), first = 0) {
        const int64_t m = std::min(groups_ - g, across().extent - first);
        const Offset base = elements.offset() + groups.offset() + index * along() + first * across();
        body(base, (r - begin) * width_ + g, m, n);
        g += m;
      }
      r += n;
    }
  }

  template <class U>
  void move(const U* from, const Move& from_step, U* to, const Move& to_step, int64_t groups, int64_t elements) const {
    for (int64_t k = 0; k < inner_.extent; ++k, from += from_step.inner, to += to_step.inner) {
      for (int64_t r = 0; r < elements; ++r) {
        const U* const from_row = from + r * from_step.element;
        U* const to_row = to + r * to_step.element;
        for (int64_t g = 0; g < groups; ++g) to_row[g * to_step.group] = from_row[g * from_step.group];
      }
    }
  }

  const View& view_;
  const A& outside_;
  const int outer_;
  const Dim inner_;
  const int64_t all_groups_, most_groups_, width_, length_;
  const bool contiguous_;
  Dims dims_;
  int64_t first_group_ = 0, groups_ = 0, loaded_begin_ = 0, loaded_end_ = 0;
  std::unique_ptr<T[]> elements_;
  std::unique_ptr<bool[]> mask_;
  A access_;
};

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

  Columns(const View& view, const Operands& operands)
      : view_(view),
        inner_(view.minor_reduced ? Dim{1, 1, 0} : view.kept.dim[view.kept.size - 1]),
        staged_(inner_.extent < kLanes),
        tile_vectors_(tile_vectors(view)),
        across_(staged_ ? 1 : ceil_div(inner_.extent / kLanes, tile_vectors_)),
        access_(operands, inner_.mask_stride),
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

template <template <class> class OpOf, class T, bool kMasked>
Kernel kernel_of_view(const View& view) {
  using Along = Parts<Rows<OpOf, T, kMasked>>;
  using Across = Parts<Columns<OpOf, T, kMasked>>;
  using Together = ShortRows<OpOf, T, kMasked>;
  if (Together::suits(view)) return {Together::work, Together::run};
  if (Columns<OpOf, T, kMasked>::suits(view)) return {Across::work, Across::run};
  return {Along::work, Along::run};
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
