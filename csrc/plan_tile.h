// Plans of the tile schedules, and what they share with the others: for plan.cc.
#pragma once

#include "plan.h"

namespace jax_softmax {

// A kept dimension that is minor is seen as lines of its own if it has so many bytes.
inline constexpr int kSegmentBytes = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// For rows that are not contiguous, of operands that begin with a whole pack and have `bytes` an element. `scratch` as
// in make_cuda_plan. False if no tile fits.
bool plan_tile(CudaPlan* plan, const View& view, int bytes, int inputs, const Device& device, bool scratch);

// What the tile_passes schedule needs, should a device take it.
int64_t tile_scratch_bytes(const View& view, int bytes, int inputs);

}  // namespace jax_softmax
