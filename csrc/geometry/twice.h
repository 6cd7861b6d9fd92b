// The schedule `twice`: a row, or a tile, read twice. A launch sums its pieces, another combines the pieces' states,
// and a third computes the results in smaller pieces: the nearer together reads and writes are, the faster.
#pragma once

#include "geometry/rows.h"
#include "geometry/tile.h"

namespace jax_softmax {

struct Twice {
  int pieces;     // of a row
  int64_t share;  // packs of each operand in a piece
  int finished;   // packs of each operand that a thread computes results of
  int threads;    // of a block
  int boundary;   // as of Registers

  template <class F>
  constexpr void each(F f) const {
    f("pieces", pieces), f("share", share), f("finished", finished), f("threads", threads);
    f("boundary", boundary);
  }
  // Of the launch that computes results.
  constexpr int64_t packs_of_block() const { return static_cast<int64_t>(finished) * threads; }
  constexpr int64_t blocks_of_row(const Runs& runs) const { return ceil_div(runs.packs, packs_of_block()); }
};

struct TwiceTile {
  Tile tile;       // a piece
  int finished;    // lines_of_thread of the smaller pieces
  bool one_block;  // whether a block has all pieces of a tile, so that no states are in device memory

  template <class F>
  constexpr void each(F f) const {
    tile.each(f);
    f("finished", finished), f("one_block", one_block);
  }
  // A piece of the launch that computes results.
  constexpr Tile smaller() const {
    Tile piece = tile;
    piece.lines_of_thread = finished;
    return piece;
  }
};

// The launch that combines the states of pieces.
struct Combining {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  int64_t pieces;
  int64_t rows;  // of a tile, whose states are contiguous; 1: a warp combines the states of one row

  constexpr int lanes_of_row() const { return rows == 1 ? 32 : kWarps; }
  constexpr int rows_of_block() const { return kThreads / lanes_of_row(); }
};
constexpr Combining combining_of(const View&, const Twice& plan, const Footprint&) { return {plan.pieces, 1}; }
constexpr Combining combining_of(const View& view, const TwiceTile& plan, const Footprint& footprint) {
  const TileGeometry g = geometry_of(view, plan.tile, footprint);
  return {g.parts, g.rows};
}

}  // namespace jax_softmax
