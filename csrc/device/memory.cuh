// What the bytes of operands and results mean: casts, masks, and expressions before the operator and after it.
// Schedules move packs, and leave these to `Memory`.
#pragma once

#include "device/functions.cuh"
#include "device/layout.cuh"
#include "device/sides.cuh"

namespace jax_softmax::device {

// Stands for an empty `load` or `store`: the operator takes the elements in memory, and has one result of elements.
struct Identity {
  static constexpr bool kIdentity = true;
  static constexpr unsigned kSidesRead = 0;
};

template <class Op_, class In_, class View_, class Sides, class Results, class Load, class Store, bool kPacks_>
struct Memory : ViewLayout<View_, Sides> {
  using Op = Op_;
  using In = In_;
  using M = typename Op::Policy;
  using C = typename M::Value;
  using Out = typename Results::template Type<0>;  // of the first result
  // Whether operands begin with whole packs, so that memory is accessed by them.
  static constexpr bool kPacks = kPacks_;
  static constexpr int kInputs = Op::kInputs, kSides = Sides::kCount, kResults = Results::kCount;
  static constexpr int kWidth = kPerPack<In>;
  static constexpr unsigned kAll = kAllBits<In>;
  using Operands = jax_softmax::Operands<kInputs, kSides, kResults, Op::kRowResults>;
  using Layout = ViewLayout<View_, Sides>;
  using Offsets = typename Layout::Offsets;
  using Layout::kColumns, Layout::kMasked, Layout::kMaskSide, Layout::side_of;
  using Values = C[kWidth][kInputs];

  // Whether packs can be compared, and pads put into them, as they are in memory: Problem::identity_load.
  static constexpr bool kIdentityLoad = Load::kIdentity;
  // Op::kFirstSummed, or 0 where expressions may read any operand.
  static constexpr int kFirstSummed = kIdentityLoad ? Op::kFirstSummed : 0;
  // Whether terms can take the place of elements in memory, so that a result needs no second exponential.
  static constexpr bool kTermsFit = Op::kResultIsScaledTerm && sizeof(In) == sizeof(C);

  // A pack that a thread keeps from one pass over a row to the next: as it is in memory or, of an expression, its
  // values, so that the expression is evaluated once.
  struct CachedWords {
    Pack raw[kInputs];
  };
  struct CachedValues {
    Values values;
  };
  using Cached = typename Conditional<kIdentityLoad, CachedWords, CachedValues>::type;

  struct Nothing {};

  // The element at a row's label, of operators that read it.
  struct ElementAtLabel {
    bool has_label;
    C value;
  };
  using LabelElement = typename Conditional<Op::kReadsLabelElement, ElementAtLabel, Nothing>::type;

  // Of operators that add at labels: `value` is added to the result of the element with the number `column`. The
  // results of a row that does not count are 0.
  struct LabelAddend {
    int column;
    C value;
    bool counts;
  };
  using Addend = typename Conditional<Op::kAddsAtLabel, LabelAddend, Nothing>::type;

  const Operands& operands;

  explicit __device__ __forceinline__ Memory(const Operands& operands) : operands(operands) {}

  __device__ __forceinline__ const In* in(int k) const { return static_cast<const In*>(operands.in[k]); }
  __device__ __forceinline__ Out* out() const { return static_cast<Out*>(operands.out[0]); }

  // ---- reading: `bits` has a bit for each element of a pack, set if the element counts; `reader` is as in sides.cuh

  // Reads a pack of which some elements count. Where memory is accessed by packs, all are read, also beyond an array's
  // end: memory is not allocated in smaller units.
  static __device__ __forceinline__ Pack load(const In* p, unsigned bits) {
    if constexpr (kPacks) {
      return load_words<kPackBytes>(p);
    } else {
      return load_elements(p, bits);
    }
  }

  // Op::pivot_candidate of a pack's elements.
  static __device__ __forceinline__ Pack pivot_candidate(const Pack& pack) {
    if constexpr (Op::kMagnitudePivot) {
      return magnitudes<In>(pack);
    } else {
      return pack;
    }
  }
  // The elementwise maximum of `largest` and the pivot candidates of a pack.
  static __device__ __forceinline__ Pack larger(const Pack& largest, const Pack& pack) {
    if constexpr (Op::kMagnitudePivot) {
      return max_of_packs<In, true>(largest, magnitudes<In>(pack));
    } else {
      return max_of_packs<In, false>(largest, pack);
    }
  }

  // The bits of the elements in `inside` that are not masked.
  template <class Reader>
  __device__ __forceinline__ unsigned unmasked(const Reader& reader, unsigned inside) const {
    if constexpr (!kMasked) {
      return inside;
    } else {
      constexpr Reading kReading = Reader::reading(kMaskSide);
      if (inside == 0) return 0;
      const auto* const mask = static_cast<const Bool*>(operands.side[kMaskSide]);
      if constexpr (kReading == Reading::kOne) {
        return (mask[reader.offsets_of(0).side[kMaskSide]].bits & 1) ? inside : 0;
      } else if constexpr (kReading == Reading::kPack) {
        return inside & bits_of_bytes(load_words<kWidth>(mask + reader.offsets_of(0).side[kMaskSide]));
      } else {
        unsigned bits = 0;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          if ((inside >> e) & 1) bits |= (mask[reader.offsets_of(e).side[kMaskSide]].bits & 1u) << e;
        }
        return bits;
      }
    }
  }

  // A pack of pads of operand k.
  static __device__ __forceinline__ Pack pad_pack(int k) {
    C pads[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pads[i] = Op::pad(k);
    return Elements<In>::narrow(pads);
  }
  // Replaces the elements that do not count by pads, where memory can hold pads.
  static __device__ __forceinline__ void put_pads(Pack (&raw)[kInputs], unsigned bits) {
    if constexpr (kIdentityLoad) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = select_elements<In>(bits, raw[k], pad_pack(k));
    }
  }

  // The values of a pack's elements after `put_pads`; those that do not count are pads.
  template <class Reader>
  __device__ __forceinline__ void values(Values& v, const Pack (&raw)[kInputs], const Reader& reader,
                                         unsigned bits) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      C w[kWidth];
      Elements<In>::widen(w, raw[k]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i][k] = w[i];
    }
    if constexpr (!kIdentityLoad) {
      if (bits != 0) {
        SideValues<Memory, Reader, Load::kSidesRead> sides;
        sides.read(*this, reader, bits);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) Load::apply(v[i], SideOfElement<decltype(sides)>{sides, i});
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
#pragma unroll
        for (int k = 0; k < kInputs; ++k) v[i][k] = (bits >> i) & 1 ? v[i][k] : Op::pad(k);
      }
    }
  }
  // Caches a pack after `put_pads`.
  template <class Reader>
  __device__ __forceinline__ void cache(Cached& cached, const Pack (&raw)[kInputs], const Reader& reader,
                                        unsigned bits) const {
    if constexpr (kIdentityLoad) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) cached.raw[k] = raw[k];
    } else {
      values(cached.values, raw, reader, bits);
    }
  }
  // The values of a cached pack.
  template <class Reader>
  __device__ __forceinline__ void values(Values& v, const Cached& cached, const Reader& reader, unsigned bits) const {
    if constexpr (kIdentityLoad) {
      values(v, cached.raw, reader, bits);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
#pragma unroll
        for (int k = 0; k < kInputs; ++k) v[i][k] = cached.values[i][k];
      }
    }
  }

  // The value of a single element.
  __device__ __forceinline__ void value(C (&v)[kInputs], const In (&raw)[kInputs], const Offsets& offsets) const {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) v[k] = Elements<In>::widen(raw[k]);
    if constexpr (!kIdentityLoad) {
      SideValues<Memory, OneElement<Offsets>, Load::kSidesRead> sides;
      sides.read(*this, OneElement<Offsets>{offsets}, 1);
      Load::apply(v, SideOfElement<decltype(sides)>{sides, 0});
    }
  }
  __device__ __forceinline__ bool is_unmasked(const Offsets& offsets) const {
    return unmasked(OneElement<Offsets>{offsets}, 1);
  }

  // ---- rows

  // What Op::term takes for terms relative to `pivot`. `begin`: the offsets of the row's first element, here and below.
  __device__ __forceinline__ typename Op::Terms terms(C pivot, const Offsets& begin) const {
    const Relative<M> relative(pivot);
    if constexpr (kIsSame<typename Op::Terms, Relative<M>>) {
      return relative;
    } else {
      C numbers[Op::kRowNumbers];
      row_numbers(numbers, begin);
      return Op::terms(relative, numbers);
    }
  }
  // What Op::finish takes, given the state of the whole row.
  __device__ __forceinline__ typename Op::Finished finished(const StateOf<Op>& state, const Offsets& begin) const {
    if constexpr (Op::kRowNumbers == 0) {
      return Op::finished(state);
    } else {
      C numbers[Op::kRowNumbers];
      row_numbers(numbers, begin);
      return Op::finished(state, numbers);
    }
  }
  // The factor that makes results of terms relative to `pivot`.
  __device__ __forceinline__ typename Op::Scale term_scale(const StateOf<Op>& state, C pivot,
                                                           const Offsets& begin) const {
    if constexpr (Op::kRowNumbers == 0) {
      return Op::term_scale(state, pivot);
    } else {
      C numbers[Op::kRowNumbers];
      row_numbers(numbers, begin);
      return Op::term_scale(state, pivot, numbers);
    }
  }
  // The element at the row's label. It takes two reads, one after the other, best begun before the row has been read.
  __device__ __forceinline__ LabelElement label_element(const Offsets& begin) const {
    if constexpr (Op::kReadsLabelElement) {
      const int label = label_of(begin);
      const bool has_label = 0 <= label && label < kColumns;
      const Offsets offsets = Layout::template along_reduced<Layout::kReducedDims>(
          begin, static_cast<typename Layout::RowIndex>(has_label ? label : 0));
      In raw[kInputs];
      C v[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) raw[k] = in(k)[offsets.element];
      value(v, raw, offsets);
      return {has_label, v[0]};
    } else {
      return {};
    }
  }
  // What the row's label changes in the results of its elements. A label may be no element's number: it then changes
  // nothing.
  __device__ __forceinline__ Addend addend(const Offsets& begin) const {
    if constexpr (Op::kAddsAtLabel) {
      C numbers[Op::kRowNumbers];
      row_numbers(numbers, begin);
      bool counts = false;
#pragma unroll
      for (int k = 0; k < Op::kRowNumbers; ++k) counts |= numbers[k] != C(0);
      return {label_of(begin), numbers[Op::kRowNumbers - 1], counts};
    } else {
      return {};
    }
  }
  // Stores the results of rows, if the operator has any.
  __device__ __forceinline__ void store_row(int64_t row, const StateOf<Op>& state,
                                            const LabelElement& label_element) const {
    if constexpr (Op::kRowResults > 0) {
      C results[Op::kRowResults];
      if constexpr (Op::kReadsLabelElement) {
        Op::row_results(state, label_element.has_label, label_element.value, results);
      } else {
        Op::row_results(state, results);
      }
#pragma unroll
      for (int k = 0; k < Op::kRowResults; ++k) static_cast<C*>(operands.row_results[k])[row] = results[k];
    }
  }

  // ---- writing

  // Sets the results of masked elements, and adds to the result at the label. Returns whether the row counts: if not,
  // all of its results must be 0. `column`: the number of the pack's first element in the row; `adds`: whether anything
  // is added.
  static __device__ __forceinline__ bool mask_and_add(C (&y)[kWidth], unsigned unmasked, const Addend& addend,
                                                      int column, bool adds = true) {
    mask(y, unmasked);
    if constexpr (Op::kAddsAtLabel) {
      if (adds && static_cast<unsigned>(addend.column - column) < kWidth) {  // which is rare
#pragma unroll
        for (int i = 0; i < kWidth; ++i) y[i] += column + i == addend.column ? addend.value : C(0);
      }
      return addend.counts;
    }
    return true;
  }
  // The same for a pack whose elements are of different rows: addend_of(i) and column_of(i) are those of element i.
  template <class AddendOf, class ColumnOf>
  static __device__ __forceinline__ bool mask_and_add(C (&y)[kWidth], unsigned unmasked, AddendOf addend_of,
                                                      ColumnOf column_of) {
    mask(y, unmasked);
    if constexpr (Op::kAddsAtLabel) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y[i] = add_at_label(y[i], addend_of(i), column_of(i));
    }
    return true;
  }
  // The result of a single element, with what its row's label changes.
  static __device__ __forceinline__ C add_at_label(C y, const Addend& addend, int column) {
    if constexpr (Op::kAddsAtLabel) {
      return !addend.counts ? C(0) : column == addend.column ? y + addend.value : y;
    } else {
      return y;
    }
  }

  // Stores the results of the elements of a pack that are `inside` the row. `y`: the operator's results; `element`: the
  // offset of the pack in the arrays of results; `first`: its address in the first array.
  template <class Reader>
  __device__ __forceinline__ void store(Out* first, int64_t element, C (&y)[kWidth], bool counts, const Reader& reader,
                                        unsigned inside) const {
    if constexpr (Store::kIdentity) {
      const auto words = Elements<Out>::narrow(y);
      store_pack(first, counts ? words : decltype(words){}, inside);
    } else {
      if (inside == 0) return;
      if constexpr (Op::kAddsAtLabel) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) y[i] = counts ? y[i] : C(0);
      }
      SideValues<Memory, Reader, Store::kSidesRead> sides;
      sides.read(*this, reader, inside);
      store_results<0>(first, element, y, sides, inside);
    }
  }
  // Stores all results of a single element but the first, which it returns.
  __device__ __forceinline__ Out store_others(const Offsets& offsets, C y) const {
    if constexpr (Store::kIdentity) {
      return Elements<Out>::narrow(y);
    } else {
      SideValues<Memory, OneElement<Offsets>, Store::kSidesRead> sides;
      sides.read(*this, OneElement<Offsets>{offsets}, 1);
      const SideOfElement<decltype(sides)> side{sides, 0};
      store_element<1>(offsets.element, y, side);
      return Elements<Out>::narrow(Store::template result<0>(y, side));
    }
  }

 private:
  template <int k, class AllSides>
  __device__ __forceinline__ void store_results(Out* first, int64_t element, const C (&y)[kWidth],
                                                const AllSides& sides, unsigned inside) const {
    if constexpr (k < kResults) {
      using T = typename Results::template Type<k>;
      C results[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        results[i] = Store::template result<k>(y[i], SideOfElement<AllSides>{sides, i});
      }
      T* const to = k == 0 ? reinterpret_cast<T*>(first) : static_cast<T*>(operands.out[k]) + element;
      store_pack(to, Elements<T>::narrow(results), inside);
      store_results<k + 1>(first, element, y, sides, inside);
    }
  }
  template <int k, class Side>
  __device__ __forceinline__ void store_element(int64_t element, C y, const Side& side) const {
    if constexpr (k < kResults) {
      using T = typename Results::template Type<k>;
      static_cast<T*>(operands.out[k])[element] = Elements<T>::narrow(Store::template result<k>(y, side));
      store_element<k + 1>(element, y, side);
    }
  }
  template <class T, class Packed>
  static __device__ __forceinline__ void store_pack(T* p, const Packed& words, unsigned inside) {
    if (kPacks && inside == kAll) {
      store_words(p, words);
    } else {
      store_elements(p, words, inside);
    }
  }
  static __device__ __forceinline__ void mask(C (&y)[kWidth], unsigned unmasked) {
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y[i] = (unmasked >> i) & 1 ? y[i] : Op::masked();
    }
  }
  __device__ __forceinline__ int label_of(const Offsets& begin) const {
    constexpr int kLabel = side_of(Role::kLabel);
    return static_cast<const int*>(operands.side[kLabel])[begin.side[kLabel]];
  }
  template <int k = 0>
  __device__ __forceinline__ void row_numbers(C* numbers, const Offsets& offsets) const {
    if constexpr (k < Op::kRowNumbers) {
      constexpr int kNumber = side_of(Role::kNumber, k);
      numbers[k] = static_cast<const C*>(operands.side[kNumber])[offsets.side[kNumber]];
      row_numbers<k + 1>(numbers, offsets);
    }
  }
};

// Whether the plan's footprint is that of Mem, so that the planner and the kernel count the same.
template <class Mem, class Plan>
inline constexpr bool kIsPlannedFor =
    Plan::kFootprint.in_bytes == static_cast<int>(sizeof(typename Mem::In)) &&
    Plan::kFootprint.out_bytes == static_cast<int>(sizeof(typename Mem::Out)) &&
    Plan::kFootprint.inputs == Mem::kInputs &&
    Plan::kFootprint.state_bytes == static_cast<int>(sizeof(StateOf<typename Mem::Op>)) &&
    Plan::kFootprint.packs == Mem::kPacks &&
    Plan::kFootprint.row_operands == (Mem::Op::kRowResults > 0 || Mem::Op::kRowNumbers > 0);

}  // namespace jax_softmax::device
