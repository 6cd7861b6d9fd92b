// The values of side operands that expressions read: of arrays that broadcast, and indices.
//
// A schedule's Reader says where the elements of a pack lie:
//
//   static constexpr Reading reading(int side)   how a pack's values in a side operand are read
//   Offsets offsets_of(int e)                        the offsets of the pack's element e
#pragma once

#include "device/pack.cuh"

namespace jax_softmax::device {

enum class Reading {
  kOne,       // one value, which the pack's elements share
  kPack,      // contiguous values, aligned to their size
  kElements,  // one by one
};

// The type that a side operand's values have in expressions.
template <class T>
struct ValueOf {
  using type = float;
};
template <>
struct ValueOf<Int32> {
  using type = int;
};
template <>
struct ValueOf<Bool> {
  using type = bool;
};

// The Reader of a single element.
template <class Offsets>
struct OneElement {
  Offsets offsets;
  static constexpr Reading reading(int) { return Reading::kOne; }
  __device__ __forceinline__ const Offsets& offsets_of(int) const { return offsets; }
};

// The values of a pack's elements in the arrays and indices from the k-th on whose bits are set in kSet.
template <class Mem, class Reader, unsigned kSet, int k = 0, bool kNone = (kSet >> k) == 0>
struct SideValues {
  __device__ __forceinline__ void read(const Mem&, const Reader&, unsigned) {}
};

template <class Mem, class Reader, unsigned kSet, int k>
struct SideValues<Mem, Reader, kSet, k, false> {
  static constexpr bool kRead = (kSet >> k) & 1;
  static constexpr int kSide = Mem::fused_side(k), kWidth = Mem::kWidth;
  static constexpr Reading kReading = kRead ? Reader::reading(kSide) : Reading::kOne;
  using T = typename Mem::template Side<kSide>;
  using Value = typename ValueOf<T>::type;

  Value own[kReading == Reading::kOne ? 1 : kWidth];
  SideValues<Mem, Reader, kSet, k + 1> others;

  // Reads the values of the elements in `bits`, which has at least one.
  __device__ __forceinline__ void read(const Mem& mem, const Reader& reader, unsigned bits) {
    if constexpr (kRead && Mem::is_index(kSide)) {
#pragma unroll
      for (int e = 0; e < (kReading == Reading::kOne ? 1 : kWidth); ++e) {
        own[e] = static_cast<int>(reader.offsets_of(e).side[kSide]);
      }
    } else if constexpr (kRead) {
      const T* const operand = static_cast<const T*>(mem.operands.side[kSide]);
      if constexpr (kReading == Reading::kPack) {
        Elements<T>::widen(own,
                           load_words<kWidth* static_cast<int>(sizeof(T))>(operand + reader.offsets_of(0).side[kSide]));
      } else {
#pragma unroll
        for (int e = 0; e < (kReading == Reading::kOne ? 1 : kWidth); ++e) {
          own[e] = Value();
          if (kReading == Reading::kOne || (bits >> e) & 1) {
            own[e] = Elements<T>::widen(operand[reader.offsets_of(e).side[kSide]]);
          }
        }
      }
    }
    others.read(mem, reader, bits);
  }
  // The e-th element's value in the j-th of the arrays and indices.
  template <int j>
  __device__ __forceinline__ auto value(int e) const {
    if constexpr (j == k) {
      return own[kReading == Reading::kOne ? 0 : e];
    } else {
      return others.template value<j>(e);
    }
  }
};

// The values of element e, as expressions take them.
template <class Values>
struct SideOfElement {
  const Values& values;
  const int e;
  template <int j>
  __device__ __forceinline__ auto value() const {
    return values.template value<j>(e);
  }
};

}  // namespace jax_softmax::device
