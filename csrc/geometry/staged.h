// The schedule `staged`: short rows side by side in shared memory. The rows of a block are contiguous: whole packs of
// each operand.
#pragma once

#include "geometry/view.h"

namespace jax_softmax {

struct Staged {
  int rows;           // of a block
  int lanes;          // that share a row
  int lane_elements;  // that a lane has registers for
  int threads;        // of a block

  template <class F>
  constexpr void each(F f) const {
    f("rows", rows), f("lanes", lanes), f("lane_elements", lane_elements), f("threads", threads);
  }
};

struct StagedGeometry {
  int64_t elements;       // of an operand in a block
  bool in_place;          // whether results overwrite the first operand
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
