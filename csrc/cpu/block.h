// What the schedules hand to the arithmetic, and what they get back: plain functions over blocks, so
// that no schedule is compiled for an operator, and no operator for a schedule.
#pragma once

#include <cstdint>

#include "core/op.h"
#include "cpu/convert.h"
#include "geometry/view.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

constexpr int kMostVectors = 64;  // of rows, in a block whose lanes lie across rows

// Where an element lies in the operands, and in the mask.
struct Offsets {
  int64_t element, mask;
};

// Elements of several rows. Either a row's elements are neighbours, and each row lies `step` from the one before
// ("along" rows); or rows are neighbours, and their elements lie `step` from the ones before ("across").
template <class T>
struct Block {
  const T* in[2];
  void* out;         // of results of `out_bytes` each
  const bool* mask;  // null without a mask
  int64_t rows;
  int64_t elements;  // of each row
  int64_t stride;
  int64_t mask_stride, mask_inner_stride;  // of the mask: the same, and from a neighbour to the next, which is 0 or 1
  typename Convert<T>::Compute* terms;     // room for whole vectors of those of each row or element, if they are kept
};

// What several rows have, a row to a lane: a state, which is a pivot and one sum or two; or their results.
template <class T>
struct States {
  typename Simd<typename Convert<T>::Compute>::Value member[kMostRowResultsOnCpu];
};

// The numbers that several rows have of their own, a row to a lane.
template <class T>
struct Numbers {
  typename Simd<typename Convert<T>::Compute>::Value number[kMostRowNumbersOnCpu];
};

// An operator on blocks.
template <class T>
struct BlockFunctions {
  struct Passes {
    // Sets the states to those of the block.
    void (*accumulate)(const Block<T>& block, States<T>* states);
    // The results, given the states of whole rows, after `take_numbers` if there is one; null if there are none for
    // elements.
    void (*finish)(const Block<T>& block, const States<T>* states);
  };
  Passes along, across;
  Passes keeping_along, keeping_across;  // the same, with terms that are kept in between, if there can be
  void (*identity)(States<T>* states, int64_t n);
  // Adds the states of later blocks to those of earlier ones.
  void (*combine)(States<T>* states, const States<T>* later, int64_t n);
  // The results of rows themselves, of so many vectors of states; null if there are none.
  void (*row_results)(const States<T>* states, int64_t n, States<T>* results);
  // Where rows have numbers of their own, makes of so many vectors of states what `finish` takes. Null where they have
  // none.
  void (*take_numbers)(States<T>* states, const Numbers<T>* numbers, int64_t n);
  // The results of the labels' elements, one of each row of a vector. `counts` says which of them are not masked.
  void (*finish_labels)(const States<T>& states, const Numbers<T>& numbers, const T* in, const bool* counts, void* out);
  int inputs;
  int64_t out_bytes;  // of a result, at most as many as of an element
  bool keeps_terms;   // whether a result is its term times a factor of the row
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
