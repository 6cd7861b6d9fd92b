// Offsets of elements in the operands and in the mask.
#pragma once

#include "cpu/block.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

// A dimension of the operands and of the mask.
struct MaskedDim {
  int64_t extent, stride, mask_stride;
};
struct MaskedDims {
  int size;
  MaskedDim dim[kMaxDims];

  MaskedDims(const Dims& dims, const int64_t (&mask_strides)[kMaxDims]) : size(dims.size) {
    for (int i = 0; i < size; ++i) dim[i] = {dims.dim[i].extent, dims.dim[i].stride, mask_strides[i]};
  }
};
Offsets operator+(Offsets a, Offsets b) { return {a.element + b.element, a.mask + b.mask}; }
Offsets operator*(int64_t n, const MaskedDim& dim) { return {n * dim.stride, n * dim.mask_stride}; }

// The offsets of the index-th combination of the first `size` dimensions' indices, the innermost varying fastest.
Offsets offsets_of(const MaskedDims& dims, int size, int64_t index) {
  Offsets offsets{0, 0};
  for (int i = size - 1; i > 0; --i) {
    offsets = offsets + index % dims.dim[i].extent * dims.dim[i];
    index /= dims.dim[i].extent;
  }
  return size > 0 ? offsets + index * dims.dim[0] : offsets;
}

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
