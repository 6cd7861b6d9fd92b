// Between TiledView (tiles.h) and operators (arithmetic.h): operators are functions over blocks, so that neither is
// compiled for the other.
#pragma once

#include <cstdint>

#include "core/op.h"
#include "cpu/convert.h"
#include "geometry/view.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

constexpr int kMostVectors = 64;  // vectors of rows of a block whose lanes lie across rows

// An element's offsets in the operands and in the mask.
struct Offsets {
  int64_t element, mask;
};

// Of a row in each lane: its numbers.
template <class T>
struct Numbers {
  typename Simd<typename Convert<T>::Compute>::Value number[kMostRowNumbersOnCpu];
};

// Elements of several rows. Lines of neighbours lie `stride` apart: a line is a row ("along" rows), or one element of
// each row ("across").
template <class T>
struct Block {
  const T* in[2];
  void* out;         // of results of `out_bytes` each
  const bool* mask;  // null without a mask
  int64_t rows;
  int64_t elements;  // of each row
  int64_t stride;
  int64_t mask_stride, mask_inner_stride;  // of the mask: from line to line; and from neighbour to neighbour, 0 or 1
  typename Convert<T>::Compute* terms;     // room for those of each line in whole vectors, if they are kept
  const Numbers<T>* numbers;               // of each vector of rows, for operators whose terms take them
};

// Of a row in each lane: its state, (pivot, sum); what `finish` takes; or its results.
template <class T>
struct States {
  typename Simd<typename Convert<T>::Compute>::Value member[kMostMembersOnCpu];
};

// An operator, as functions over blocks. `n` is how many vectors of rows an array of states is for.
template <class T>
struct BlockFunctions {
  struct Passes {
    // Sets the states to those of the block.
    void (*accumulate)(const Block<T>& block, States<T>* states);
    // Writes the results of elements, given the states of whole rows, after `take_numbers` if there is one. Null
    // without results of elements.
    void (*finish)(const Block<T>& block, const States<T>* states);
  };
  Passes along, across;
  Passes keeping_along, keeping_across;  // the same, with terms that are kept in between if keeps_terms
  void (*identity)(States<T>* states, int64_t n);
  // Combines the states of earlier blocks with those of later ones.
  void (*combine)(States<T>* states, const States<T>* later, int64_t n);
  // Sets the results of rows; null without them.
  void (*row_results)(const States<T>* states, int64_t n, States<T>* results);
  // Makes what `finish` takes of states and the rows' numbers; null where it takes none.
  void (*take_numbers)(States<T>* states, const Numbers<T>* numbers, int64_t n);
  // Sets the results of the elements at the labels of a vector of rows. `counts`: which of them are not masked. Null
  // for operators that add nothing there.
  void (*finish_labels)(const States<T>& states, const Numbers<T>& numbers, const T* in, const bool* counts, void* out);
  int inputs;
  int64_t out_bytes;  // of a result: at most as many as of an element
  bool keeps_terms;   // whether results are scaled terms, which `accumulate` may keep for `finish`
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
