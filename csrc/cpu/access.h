// Where elements lie, and how vectors of them are read and written.
#pragma once

#include <cstring>

#include "cpu/cpu.h"
#include "cpu/simd.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

struct Offset {
  int64_t element;
  int64_t mask;
};
Offset operator+(Offset a, Offset b) { return {a.element + b.element, a.mask + b.mask}; }
Offset operator*(int64_t n, const Dim& dim) { return {n * dim.stride, n * dim.side[0]}; }

// Where the index-th combination of the dimensions' indices lies, the innermost varying fastest.
Offset offset_of(const Dims& dims, int size, int64_t index) {
  Offset offset{0, 0};
  for (int i = size - 1; i >= 0; --i) {
    const Dim& dim = dims.dim[i];
    const int64_t rest = i == 0 ? 0 : index / dim.extent;
    const int64_t here = index - rest * dim.extent;
    offset.element += here * dim.stride;
    offset.mask += here * dim.side[0];
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
      offset_.mask += index_[i] * dims.dim[i].side[0];
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
      offset_.mask += dim.side[0];
      if (++index_[i] < dim.extent) return;
      index_[i] = 0;
      offset_.element -= dim.extent * dim.stride;
      offset_.mask -= dim.extent * dim.side[0];
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

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
