// The schedule `twice`: a row, or a tile, read twice in pieces. A launch sums the pieces, another combines the states
// of the pieces of each row, and a third finishes the rows in smaller parts: the nearer together what is read and
// written, the faster.
#pragma once

#include "geometry/rows.h"
#include "geometry/tile.h"

namespace jax_softmax {

struct Twice {
  int pieces;     // of a row
  int64_t share;  // packs of each operand in one
  int finished;   // packs of each operand that a thread finishes
  int threads;    // of a block
  int boundary;   // as of Registers

  template <class F>
  constexpr void each(F f) const {
    f("pieces", pieces), f("share", share), f("finished", finished), f("threads", threads);
    f("boundary", boundary);
  }
  // Of the launch that finishes rows.
  constexpr int64_t packs_of_block() const { return static_cast<int64_t>(finished) * threads; }
  constexpr int64_t blocks_of_row(const Runs& runs) const { return ceil_div(runs.packs, packs_of_block()); }
};

struct TwiceTile {
  Tile tile;       // a piece
  int finished;    // lines of a thread that finishes a smaller one
  bool one_block;  // whether a block has all pieces of a tile, so that there are no states in memory

  template <class F>
  constexpr void each(F f) const {
    tile.each(f);
    f("finished", finished), f("one_block", one_block);
  }
  // The same tile in the smaller pieces of the launch that finishes its rows.
  constexpr Tile smaller() const {
    Tile piece = tile;
    piece.lines_of_thread = finished;
    return piece;
  }
};

// The launch between them, of so many states for each row.
struct Combining {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  int64_t pieces;
  int64_t rows;  // of a tile, whose states are neighbours; or 1, of which a warp has the states

  constexpr int lanes_of_row() const { return rows == 1 ? 32 : kWarps; }
  constexpr int rows_of_block() const { return kThreads / lanes_of_row(); }
};
constexpr Combining combining_of(const View&, const Twice& plan, const Footprint&) { return {plan.pieces, 1}; }
constexpr Combining combining_of(const View& view, const TwiceTile& plan, const Footprint& footprint) {
  const TileGeometry g = geometry_of(view, plan.tile, footprint);
  return {g.parts, g.rows};
}

}  // namespace jax_softmax
