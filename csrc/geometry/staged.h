// The schedule `staged`: short rows side by side in shared memory, where the rows of a block are one run of whole packs
// for each operand.
#pragma once

#include "geometry/view.h"

namespace jax_softmax {

struct Staged {
  int rows;     // of a block
  int lanes;    // that share a row
  int held;     // elements that a lane has room for
  int threads;  // of a block
  bool pairs;   // whether lanes have two elements at once
  int spread;   // a power of 2: how many rows apart those lie that a warp has pairs of

  template <class F>
  constexpr void each(F f) const {
    f("rows", rows), f("lanes", lanes), f("held", held), f("threads", threads), f("pairs", pairs), f("spread", spread);
  }
};

struct StagedGeometry {
  int64_t elements;       // of an operand in a block
  bool in_place;          // whether results take the first operand's place
  int64_t results_begin;  // bytes, in shared memory
  int64_t shared_bytes;
};

constexpr StagedGeometry geometry_of(const View& view, const Staged& plan, const Footprint& footprint) {
  StagedGeometry g{};
  g.elements = plan.rows * view.columns;
  g.in_place = footprint.in_bytes == footprint.out_bytes;
  const int64_t operands = g.elements * footprint.in_bytes * footprint.inputs;
  g.results_begin = g.in_place ? 0 : operands;
  g.shared_bytes = g.in_place ? operands : operands + g.elements * footprint.out_bytes;
  return g;
}

}  // namespace jax_softmax
