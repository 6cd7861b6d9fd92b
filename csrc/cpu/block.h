// What the schedules hand to the arithmetic, and what they get back: plain functions over blocks of floats or doubles,
// so that no schedule is compiled for an operator, and no operator for a storage type, a mask or a shape.
#pragma once

#include <cstdint>

#include "cpu/simd.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

// Elements of several rows. Either a row's elements are neighbours, and its first one lies `step` from the next row's;
// or rows are neighbours, whole vectors of them, and an element of each lies `step` from the next.
template <class F>
struct Block {
  const F* in[2];
  F* out;
  int64_t rows;
  int64_t elements;  // of each row
  int64_t step;
};

constexpr int kMostVectors = 64;  // of rows, in a block whose lanes lie across rows

template <class F>
using States = State<typename Simd<F>::Value>;

// An operator on blocks of either kind. States are those of rows, a row to a lane.
template <class F>
struct Arithmetic {
  struct Ways {
    // Sets the states to those of the block. If `keep`, leaves the terms where the results will be.
    void (*accumulate)(const Block<F>& block, bool keep, States<F>* states);
    // The results, given the states of whole rows and whether the terms are where the results will be.
    void (*finish)(const Block<F>& block, bool kept, const States<F>* states);
  };
  Ways along;   // the lanes lie along rows
  Ways across;  // the lanes lie across rows
  void (*identity)(States<F>* states, int64_t n);
  // Adds n states to others: the rows' of a later block to those of earlier ones.
  void (*combine)(States<F>* states, const States<F>* later, int64_t n);
  int inputs;
  bool keeps;  // whether a result is its term times a factor of the row
  F pad;       // stands in for an element that is masked
  F masked;    // the result there
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
