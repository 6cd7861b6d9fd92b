// What the schedules `tile` and `twice` share.
#pragma once

#include "plan/plan.h"

namespace jax_softmax {

// Of the kept dimensions, those that are not inside of all reduced ones.
int outer_kept(const View& view);

// Parts of a tile that blocks have: a cluster's, or pieces that are read one by one.
int64_t parts_of(const Tile& tile, const Problem& problem);

int64_t shared_bytes_of(const Tile& tile, const Problem& problem);
// The view's rows that a tile has states of.
int64_t rows_of(const Tile& tile, const Problem& problem);
int64_t tiles_of(const Tile& tile, const Problem& problem);
Launch launch_of(const Tile& tile, const Problem& problem, const Device& device);

}  // namespace jax_softmax
