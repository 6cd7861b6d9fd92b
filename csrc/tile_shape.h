// Shapes of tiles: which fit, and which of them takes least time. For plan_tile.cc, which says what lines they have.
#pragma once

#include <algorithm>
#include <numeric>

#include "plan_tile.h"

namespace jax_softmax {

// Where a tile fits that, some tile fits every chip, and needs no scratch memory.
inline constexpr Device kSmallestDevice{75, 1, 64 << 10, 1};
inline constexpr int kMostTileNumbers = 1 << 30;    // packs, lines, positions that are counted in 32 bits
inline constexpr int64_t kStripSegmentBytes = 128;  // of a segment of strips of several lines, at the least

constexpr int state_bytes(int bytes) { return 2 * std::max(bytes, 4); }

// Lines so many apart begin alike in a pack.
constexpr int64_t turn_of(int width, int64_t stride) { return width / std::gcd<int64_t>(width, stride); }

// A tile of `packs` of each line in `groups` of lines, with some lines to a thread; false if that is too large.
bool lay_out(CudaPlan* plan, Tile tile, int packs, int groups, int held, int bytes, int inputs, int most_threads,
             const Device& device, int most_blocks, bool passes);

// The shape that takes least time, for a tile of parts of runs of interleaved rows, of `unit` packs; false if none
// fits, here as below.
bool choose_interleaved(CudaPlan* plan, const Tile& tile, int unit, int bytes, int inputs, const Device& device);

// The same for lines of which each begins as the one `turn` lines on.
bool choose_lines(CudaPlan* plan, const Tile& tile, int turn, int bytes, int inputs, const Device& device);

// Strips of few lines, of a row to `inner` elements of each, or of small arrays, as a line each has all of its rows in;
// false if rows have more elements than other tiles are slower with.
bool choose_strips(CudaPlan* plan, Tile tile, int bytes, int inputs, const Device& device);

// `packs`, or as few as hold a segment that begins anywhere in the first one.
int packs_of_part(const Tile& tile, int packs, int bytes);

}  // namespace jax_softmax
