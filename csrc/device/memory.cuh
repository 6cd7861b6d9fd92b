// The one place that interprets memory: what the operands' bytes mean to an operator, and what becomes of its results.
// A schedule moves packs and asks here for their values; a cast, a mask, or what is fused before an operator is
// something that schedules never see.
#pragma once

#include "device/pack.cuh"

namespace jax_softmax::device {

inline constexpr int kMostSides = 6;
inline constexpr int kMostRowResults = 3;

// The kernels' only parameter, as csrc/ffi fills it in.
struct Operands {
  const void* in[2];  // of one shape: the operator's operands
  // That broadcast to that shape: what is fused reads, then what rows have of their own, or labels, then the mask.
  const void* side[kMostSides];
  void* out;
  uint64_t* words;  // memory for blocks to exchange states through, or null
  int64_t rows;
  void* of_rows[kMostRowResults];  // results that rows have themselves
};

// A dimension of the view: its extent, and how far apart its neighbours lie in the operands and in each side operand.
template <int kSides>
struct SidedDim {
  int64_t extent;
  int64_t stride;
  int64_t side[kSides > 0 ? kSides : 1];
};

// Where an element lies in the operands, and in the side operands.
template <int kSides>
struct Offset {
  int64_t element;
  int64_t side[kSides > 0 ? kSides : 1];

  // `index` steps along a dimension.
  __device__ __forceinline__ Offset along(const SidedDim<kSides>& dim, int64_t index) const {
    Offset moved = *this;
    moved.element += index * dim.stride;
#pragma unroll
    for (int s = 0; s < kSides; ++s) moved.side[s] += index * dim.side[s];
    return moved;
  }
};

// What is fused before an operator: `apply` makes an element's value of the element and of the side operands' elements.
// Without any, packs can be compared, and pads put into them, as they are in memory.
struct NothingFused {
  static constexpr bool kNothing = true;
  template <int side>
  using Side = void;
  static constexpr int kSides = 0;
};

template <class Op_, class In_, class Out_, class Fused, bool kMasked_, bool kPacks_, class View_>
struct Memory {
  using Op = Op_;
  using In = In_;
  using Out = Out_;
  using M = typename Op::Policy;
  using C = typename M::Value;
  static constexpr bool kMasked = kMasked_;
  static constexpr bool kPacks =
      kPacks_;  // whether operands begin with whole packs, so that memory is accessed by them
  static constexpr int kInputs = Op::kInputs;
  static constexpr int kWidth = kPerPack<In>;
  static constexpr int kLabelSide = Fused::kSides + Op::kRowNumbers;
  static constexpr int kSides = kLabelSide + Op::kLabelled + kMasked;
  static constexpr unsigned kAll = kAllBits<In>;
  using View = View_;
  static_assert(kSides == View::kSides);
  static constexpr int64_t kColumns = View::kView.columns;
  using Place = Offset<kSides>;
  using Dim = SidedDim<kSides>;
  using RowIndex = typename Conditional<View::kWide, uint64_t, uint32_t>::type;
  using Values = C[kWidth][kInputs];
  using Results = Words<kWidth* static_cast<int>(sizeof(Out))>;
  // Whether the largest word of memory has the largest value, and pads can stand in memory.
  static constexpr bool kOrdered = Fused::kNothing && sizeof(In) > 1;
  // Terms can be kept in the place of elements, to be taken once.
  static constexpr bool kTermsFit = Op::kResultIsScaledTerm && sizeof(In) == sizeof(C);

  // What the results of a row are made of besides its state.
  struct LabelledElement {
    bool has_label;
    C labelled;
  };
  struct NoElement {};
  static constexpr bool kReadsLabelled = Op::kLabelled && !Op::kElementResults;
  using OfRow = typename Conditional<kReadsLabelled, LabelledElement, NoElement>::type;

  // What a row's label changes in the results of its elements: `value` is added to that of the label's column, unless
  // the row does not count; then all are 0.
  struct LabelAddend {
    int column;
    C value;
    bool counts;
  };
  struct NoAddend {};
  static constexpr bool kAddsAtLabel = Op::kLabelled && Op::kElementResults;
  using Addend = typename Conditional<kAddsAtLabel, LabelAddend, NoAddend>::type;

  const Operands& operands;

  __device__ __forceinline__ const In* in(int k) const { return static_cast<const In*>(operands.in[k]); }
  __device__ __forceinline__ Out* out() const { return static_cast<Out*>(operands.out); }

  // ---- reading: `at` is where a pack's first element lies, which may be before the row's; `bits` are those that count

  // Of a pack that lies at a whole pack of memory and has elements that count: what is around them can be read as well,
  // since memory is never allocated in smaller units.
  static __device__ __forceinline__ Pack load(const In* p, unsigned bits) {
    if constexpr (kPacks) {
      return load_pack(p);
    } else {
      return load_elements(p, bits);
    }
  }

  // Packs that stand for all elements before them: in each place the largest of what a pivot is the maximum of.
  static __device__ __forceinline__ Pack of_pivot(const Pack& pack) {
    if constexpr (Op::kOfMagnitudes) {
      return magnitudes<In>(pack);
    } else {
      return pack;
    }
  }
  static __device__ __forceinline__ Pack larger(const Pack& largest, const Pack& pack) {
    if constexpr (Op::kOfMagnitudes) {
      return Elements<In>::max_or_nan(largest, magnitudes<In>(pack));
    } else {
      return Elements<In>::max(largest, pack);
    }
  }

  // The bits of those among `inside` that are not masked. Neighbouring elements are neighbours along `dim`.
  __device__ __forceinline__ unsigned unmasked(const Place& at, const Dim& dim, unsigned inside) const {
    if constexpr (!kMasked) return inside;
    const auto* const mask = static_cast<const uint8_t*>(operands.side[kSides - 1]) + at.side[kMasked ? kSides - 1 : 0];
    const int64_t step = dim.side[kMasked ? kSides - 1 : 0];
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if ((inside >> i) & 1) kept |= static_cast<unsigned>(mask[i * step]) << i;
    }
    return kept;
  }

  // What stands for a pack that is not there: pads, where memory can hold them.
  static __device__ __forceinline__ Pack pad_pack(int k) {
    if constexpr (sizeof(In) == 1) {
      return Pack{};
    } else {
      C pads[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) pads[i] = Op::pad(k);
      return Elements<In>::narrow(pads);
    }
  }
  // Puts pads in the place of elements that do not count, where memory can hold pads.
  static __device__ __forceinline__ void mend(Pack (&raw)[kInputs], unsigned bits) {
    if constexpr (kOrdered) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = select_elements<In>(bits, raw[k], pad_pack(k));
    }
  }

  // The values of a mended pack's elements.
  __device__ __forceinline__ void values(Values& v, const Pack (&raw)[kInputs], const Place& at, const Dim& dim,
                                         unsigned bits) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      C w[kWidth];
      Elements<In>::widen(w, raw[k]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i][k] = w[i];
    }
    if constexpr (!kOrdered) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if ((bits >> i) & 1) {
          fuse(v[i], at.along(dim, i));
        } else {
#pragma unroll
          for (int k = 0; k < kInputs; ++k) v[i][k] = Op::pad(k);
        }
      }
    }
  }

  // What is fused before the operator, to the value of an element that counts.
  __device__ __forceinline__ void fuse(C (&v)[kInputs], const Place& at) const {
    if constexpr (!Fused::kNothing) v[kInputs - 1] = fused(v[kInputs - 1], at);
  }
  // The value of a single element.
  __device__ __forceinline__ void value(C (&v)[kInputs], const In (&raw)[kInputs], const Place& at) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) v[k] = Elements<In>::widen(raw[k]);
    if constexpr (!Fused::kNothing) v[kInputs - 1] = fused(v[kInputs - 1], at);
    if constexpr (kMasked) {
      if (!is_kept(at)) {
#pragma unroll
        for (int k = 0; k < kInputs; ++k) v[k] = Op::pad(k);
      }
    }
  }
  __device__ __forceinline__ bool is_kept(const Place& at) const {
    if constexpr (kMasked) {
      return static_cast<const uint8_t*>(operands.side[kSides - 1])[at.side[kSides - 1]];
    } else {
      return true;
    }
  }

  // ---- rows

  // The d-th kept or reduced dimension of the view.
  static constexpr __device__ __forceinline__ Dim kept_dim(int d) {
    Dim dim{View::kView.kept.dim[d].extent, View::kView.kept.dim[d].stride, {}};
    for (int s = 0; s < kSides; ++s) dim.side[s] = View::kSideStrides[s].kept[d];
    return dim;
  }
  static constexpr __device__ __forceinline__ Dim reduced_dim(int d) {
    Dim dim{View::kView.reduced.dim[d].extent, View::kView.reduced.dim[d].stride, {}};
    for (int s = 0; s < kSides; ++s) dim.side[s] = View::kSideStrides[s].reduced[d];
    return dim;
  }
  static constexpr int kKeptDims = View::kView.kept.size, kReducedDims = View::kView.reduced.size;
  // `from` moved by the index-th combination of the indices of the kept, or reduced, dimensions [kBegin, kEnd), the
  // innermost of which varies fastest. Extents are constants, so that no division is one; the outermost one's is not
  // needed.
  template <int kEnd, int kBegin = 0, class Index>
  static __device__ __forceinline__ Place along_kept(const Place& from, Index index) {
    return moved<true, kEnd, kBegin>(from, index);
  }
  template <int kEnd, int kBegin = 0, class Index>
  static __device__ __forceinline__ Place along_reduced(const Place& from, Index index) {
    return moved<false, kEnd, kBegin>(from, index);
  }
  // Where a row's first element lies.
  static __device__ __forceinline__ Place begin_of(int64_t row) {
    return along_kept<kKeptDims>(Place{}, static_cast<RowIndex>(row));
  }

  // What terms relative to a pivot are made with, of the row that lies at `at`.
  __device__ __forceinline__ typename Op::Terms terms(C pivot, const Place& at) const {
    const Relative<M> relative(pivot);
    if constexpr (kIsSame<typename Op::Terms, Relative<M>>) {
      return relative;
    } else {
      C given[Op::kRowNumbers];
      row_numbers(given, at);
      return Op::terms(relative, given);
    }
  }
  // What a row's state amounts to for its elements; it lies at `at`.
  __device__ __forceinline__ typename Op::Row row(const StateOf<Op>& state, const Place& at) const {
    if constexpr (Op::kRowNumbers == 0) {
      return Op::row(state);
    } else {
      C given[Op::kRowNumbers];
      row_numbers(given, at);
      return Op::row(state, given);
    }
  }
  // The same for terms, relative to a pivot of their own.
  __device__ __forceinline__ typename Op::Scale term_scale(const StateOf<Op>& state, C pivot, const Place& at) const {
    if constexpr (Op::kRowNumbers == 0) {
      return Op::term_scale(state, pivot);
    } else {
      C given[Op::kRowNumbers];
      row_numbers(given, at);
      return Op::term_scale(state, pivot, given);
    }
  }
  // What the results of a row, which lies at `begin`, are made of besides its state: the element that is its label's.
  // It takes two accesses, one after the other, and is best asked for while the row is still on its way.
  __device__ __forceinline__ OfRow of_row(const Place& begin) const {
    if constexpr (kReadsLabelled) {
      const int label = label_of(begin);
      const bool has_label = 0 <= label && label < kColumns;
      const Place at = along_reduced<kReducedDims>(begin, static_cast<RowIndex>(has_label ? label : 0));
      return {has_label, Elements<In>::widen(in(0)[at.element])};
    } else {
      return {};
    }
  }
  // The same of the results of its elements. A label that is no column of the row is none of an element whose result is
  // stored.
  __device__ __forceinline__ Addend addend(const Place& begin) const {
    if constexpr (kAddsAtLabel) {
      C given[Op::kRowNumbers];
      row_numbers(given, begin);
      bool counts = false;
#pragma unroll
      for (int k = 0; k < Op::kRowNumbers; ++k) counts |= given[k] != C(0);
      return {label_of(begin), given[Op::kRowNumbers - 1], counts};
    } else {
      return {};
    }
  }
  // Stores the results that the row has itself, if any.
  __device__ __forceinline__ void store_row(int64_t row, const StateOf<Op>& state, const OfRow& of_row) const {
    if constexpr (Op::kRowResults > 0) {
      C results[Op::kRowResults];
      if constexpr (kReadsLabelled) {
        Op::row_results(state, of_row.has_label, of_row.labelled, results);
      } else {
        Op::row_results(state, results);
      }
#pragma unroll
      for (int k = 0; k < Op::kRowResults; ++k) static_cast<C*>(operands.of_rows[k])[row] = results[k];
    }
  }

  // ---- writing

  // The results of a pack's elements, of one row, those that are not `kept` being masked; `column` is the first one's.
  static __device__ __forceinline__ Results results(C (&r)[kWidth], unsigned kept, const Addend& addend, int column) {
    mask(r, kept);
    if constexpr (kAddsAtLabel) {
      if (static_cast<unsigned>(addend.column - column) < kWidth) {  // which is rare
#pragma unroll
        for (int i = 0; i < kWidth; ++i) r[i] += column + i == addend.column ? addend.value : C(0);
      }
      return addend.counts ? narrow(r) : Results{};
    }
    return narrow(r);
  }
  // The same where each element is of a row of its own: addend_of(i) and column_of(i) are element i's.
  template <class AddendOf, class ColumnOf>
  static __device__ __forceinline__ Results results(C (&r)[kWidth], unsigned kept, AddendOf addend_of,
                                                    ColumnOf column_of) {
    mask(r, kept);
    if constexpr (kAddsAtLabel) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) r[i] = labelled(r[i], addend_of(i), column_of(i));
    }
    return narrow(r);
  }
  // The result of one element of a row.
  static __device__ __forceinline__ C labelled(C r, const Addend& addend, int column) {
    if constexpr (kAddsAtLabel) {
      return !addend.counts ? C(0) : column == addend.column ? r + addend.value : r;
    } else {
      return r;
    }
  }
  static __device__ __forceinline__ void mask(C (&r)[kWidth], unsigned kept) {
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) r[i] = (kept >> i) & 1 ? r[i] : Op::masked();
    }
  }
  // One result or several, as they are in memory.
  template <class R>
  static __device__ __forceinline__ auto narrow(const R& r) {
    if constexpr (Op::kWithinRange && sizeof(Out) == 1) {
      return Elements<Out>::narrow_within_range(r);
    } else {
      return Elements<Out>::narrow(r);
    }
  }
  // Stores those that are `inside` the row.
  static __device__ __forceinline__ void store(Out* p, const Results& words, unsigned inside) {
    if (kPacks && inside == kAll) {
      store_words(p, words);
    } else {
      store_elements(p, words, inside);
    }
  }

 private:
  template <bool kKept, int kEnd, int kBegin, class Index>
  static __device__ __forceinline__ Place moved(const Place& from, Index index) {
    if constexpr (kBegin == kEnd) {
      return from;
    } else {
      constexpr Dim dim = kKept ? kept_dim(kEnd - 1) : reduced_dim(kEnd - 1);
      if constexpr (kBegin == kEnd - 1) {
        return from.along(dim, index);
      } else {
        const Index outer = index / static_cast<Index>(dim.extent);
        return moved<kKept, kEnd - 1, kBegin>(from.along(dim, index - outer * static_cast<Index>(dim.extent)), outer);
      }
    }
  }
  __device__ __forceinline__ int label_of(const Place& begin) const {
    return static_cast<const int*>(operands.side[kLabelSide])[begin.side[kLabelSide]];
  }
  __device__ __forceinline__ void row_numbers(C* given, const Place& at) const {
#pragma unroll
    for (int k = 0; k < Op::kRowNumbers; ++k) {
      given[k] = static_cast<const C*>(operands.side[Fused::kSides + k])[at.side[Fused::kSides + k]];
    }
  }
  template <int side = 0>
  __device__ __forceinline__ void read_sides(C (&s)[kMostSides], const Place& at) const {
    if constexpr (side < Fused::kSides) {
      using Side = typename Fused::template Side<side>;
      s[side] = Elements<Side>::widen(static_cast<const Side*>(operands.side[side])[at.side[side]]);
      read_sides<side + 1>(s, at);
    }
  }
  __device__ __forceinline__ C fused(C x, const Place& at) const {
    C s[kMostSides];
    read_sides(s, at);
    return Fused::apply(x, s);
  }
};

// The maximum over mended packs: of the words as they are in memory, where that is the maximum of their values.
template <class Mem>
struct Largest {
  using C = typename Mem::C;
  Pack raw = Mem::pad_pack(0);
  C value = -Mem::M::kInfinity;

  __device__ __forceinline__ void add(const Mem& mem, const Pack (&pack)[Mem::kInputs], const typename Mem::Place& at,
                                      const typename Mem::Dim& dim, unsigned bits) {
    if constexpr (Mem::kOrdered) {
      raw = Mem::larger(raw, pack[0]);
    } else {
      typename Mem::Values v;
      mem.values(v, pack, at, dim, bits);
#pragma unroll
      for (int i = 0; i < Mem::kWidth; ++i) value = Mem::M::max(value, Mem::Op::of_pivot(v[i][0]));
    }
  }
  __device__ __forceinline__ C get() const {
    if constexpr (Mem::kOrdered) {
      C v[Mem::kWidth];
      Elements<typename Mem::In>::widen(v, raw);
      C m = v[0];
#pragma unroll
      for (int i = 1; i < Mem::kWidth; ++i) m = Mem::M::max(m, v[i]);
      return m;
    } else {
      return value;
    }
  }
};

}  // namespace jax_softmax::device
