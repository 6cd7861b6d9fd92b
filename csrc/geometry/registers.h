// The schedule `registers`: a row in the registers of a team of lanes.
#pragma once

#include "geometry/rows.h"

namespace jax_softmax {

struct Registers {
  int lanes;     // that share a row
  int packs;     // of each operand that a lane holds
  int threads;   // of a block
  int boundary;  // bytes: a run's first pack begins at the last multiple of this at or before the run; 0: with the run

  template <class F>
  constexpr void each(F f) const {
    f("lanes", lanes), f("packs", packs), f("threads", threads), f("boundary", boundary);
  }
  constexpr int rows_of_block() const { return threads / lanes; }
};

}  // namespace jax_softmax
