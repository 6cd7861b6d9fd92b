// The geometry of a tile: neighbouring rows whose elements are not contiguous.
//
// A line is the elements of one index of the reduced dimensions that are contiguous, each of another row. A matrix is
// all lines of the same rows: the lines of one index of the outer batch dimensions. A tile is the same part of each
// line of a matrix.
//
// An example: a view with a batch, a reduced and a batch dimension of extents 2, 8 and 40, packs of 4 elements, and
// tiles of 16 elements of each line. So there are 2 matrices of 8 lines, and 3 tiles to a matrix. The first tile:
//
// clang-format off
//
//             tile 0: 16 elements    tile 1                 tile 2: the rest
//           +----+----+----+----+----------------------+-----------+
//   line 0  | a0 | a1 | a2 | a3 |                      |           |   a0 ... a3: the packs of team a, a thread each
//   line 1  | b0 | b1 | b2 | b3 |                      |           |   b0 ... b3: the packs of team b
//   line 2  | a0 | a1 | a2 | a3 |                      |           |
//   line 3  | b0 | b1 | b2 | b3 |                      |           |   packs = 4
//   line 4  | a0 | a1 | a2 | a3 |                      |           |   lines_at_once = 2, one for each team
//   line 5  | b0 | b1 | b2 | b3 |                      |           |   lines_of_thread = 4
//   line 6  | a0 | a1 | a2 | a3 |                      |           |   threads of a matrix = 2 * 4
//   line 7  | b0 | b1 | b2 | b3 |                      |           |
//           +----+----+----+----+----------------------+-----------+
//
// clang-format on
//
// A row goes from top to bottom. Thread a1 has the second pack of lines 0, 2, 4 and 6, and a state (a running
// maximum and a sum) for each of the pack's 4 elements. The states of a1 and b1 are of the same rows, and are combined.
//
// Parts: if a tile has more lines than a block has room for, each block of a cluster holds a part of the lines. A tile
// that is read twice is cut in the same way: its parts are the pieces.
//
// Ragged lines: a line may begin inside a pack. Lines `period` apart begin at the same offset in a pack, and all lines
// of a thread do. The last packs of a tile reach into the next tile, so both tiles have states of those rows.
//
// Folded lines: `fold` short lines of the view are one line of the tile, of whole packs. A matrix is then contiguous, a
// tile is one matrix or several, and a folded line has `fold` elements of each row.
//
// Spans: with several reduced dimensions, a matrix has a span of contiguous lines for each index of the outer ones.
#pragma once

#include "geometry/view.h"

namespace jax_softmax {

struct Tile {
  int threads;          // of a block
  int matrices;         // of a tile; if several, the tile has all of their rows
  int elements;         // of a line of the view, in a tile
  int fold;             // lines of the view in a line of the tile
  int packs;            // of a line of the tile
  int lines_at_once;    // teams of a matrix, each with a line of its own
  int lines_of_thread;  // lines of a team, one after the other
  bool aligned;         // whether all lines or, folded, all spans begin with whole packs
  bool in_shared;       // whether shared memory holds the lines; if not, threads read them from global memory

  template <class F>
  constexpr void each(F f) const {
    f("threads", threads), f("matrices", matrices), f("elements", elements), f("fold", fold), f("packs", packs);
    f("lines_at_once", lines_at_once), f("lines_of_thread", lines_of_thread), f("aligned", aligned);
    f("in_shared", in_shared);
  }
};

// A view as lines.
struct Lines {
  int64_t elements;    // of a line
  int64_t neighbours;  // contiguous lines: the innermost reduced extent
  int64_t spans;       // of a matrix: the product of the other reduced extents
  bool aligned;        // whether all lines begin with whole packs
  int period;          // in lines: the distance of lines that begin at the same offset in a pack

  constexpr int64_t run() const { return neighbours * elements; }  // elements of a span
};

constexpr bool power_of_2(int64_t n) { return (n & (n - 1)) == 0; }
constexpr int64_t next_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}
constexpr int64_t common_divisor(int64_t a, int64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

constexpr Lines lines_of(const View& view, const Footprint& footprint) {
  const int width = footprint.width();
  const Dim& innermost = view.reduced.innermost();
  Lines lines{innermost.stride, innermost.extent, view.columns / innermost.extent, true, 1};
  bool aligned = lines.elements % width == 0;
  for (int i = 0; i < view.reduced.size; ++i) aligned &= view.reduced.dim[i].stride % width == 0;
  for (int i = 0; i < view.outer_batch(); ++i) aligned &= view.batch.dim[i].stride % width == 0;
  lines.aligned = aligned || !footprint.packs;  // or elements are accessed one by one
  if (!lines.aligned) lines.period = static_cast<int>(width / common_divisor(width, lines.elements));
  return lines;
}

// How many of the tile's lines a span has, rounded up to whole periods.
constexpr int64_t lines_of_span(const Lines& lines, const Tile& tile, const Footprint& footprint) {
  if (tile.fold == 1) return round_up(lines.neighbours, lines.period);
  // The most elements of the first pack that another span has.
  const int64_t before = tile.aligned ? 0 : footprint.width() - 1;
  return ceil_div(lines.run() + before, static_cast<int64_t>(tile.packs) * footprint.width());
}

// What follows from a tile and a view.
struct TileGeometry {
  // Lines.
  int64_t period;         // as of Lines, or 1 if folded
  int64_t lines_of_span;  // rounded up to whole periods
  int64_t lines_of_block;
  // A section is the lines that are cut into parts: those of all spans or, folded, of one span.
  int64_t parts_of_section;
  int64_t parts;          // of a tile: the blocks of a cluster, or the pieces of a tile that is read twice
  int64_t tiles_of_line;  // tiles that a line is cut into
  int64_t reach;          // the most elements of the next tile in the last packs of a line
  int64_t rows;           // that a tile has states of, those of `reach` included
  int64_t threads_of_matrix;

  // States. First shuffles combine those of `lines_summed` teams in a warp, into a set: a state for each element of a
  // line of the tile. Then the sets are combined in shared memory.
  bool line_in_pack;         // whether a folded line is one pack: its elements of one row then share a state
  int64_t states_of_thread;  // one for each element of a pack, or for each of its rows if line_in_pack
  int64_t states_of_line;    // for one row, of a line of the tile
  int64_t lines_summed;      // teams whose states shuffles combine
  int64_t sets;              // of a matrix
  int64_t states_of_set;
  int64_t states_of_row;  // in all sets of its matrix
  int64_t lanes_of_row;   // lanes that combine those
  bool private_states;    // whether each thread has the states of whole rows, and no other thread needs them

  // Shared memory has, in this order: packs of lines; the sets, later overwritten by the states of all blocks of a
  // cluster; the states of whole rows.
  int64_t packs_in_shared;
  int64_t states_before_rows;
  int64_t shared_bytes;

  int64_t matrices;          // of a tile
  int64_t elements_of_line;  // of the view
  constexpr int64_t tiles(int64_t view_rows) const {
    return ceil_div(view_rows / elements_of_line, matrices) * tiles_of_line;
  }
};

constexpr TileGeometry geometry_of(const View& view, const Tile& tile, const Footprint& footprint) {
  const Lines lines = lines_of(view, footprint);
  const bool folded = tile.fold > 1;
  const int width = footprint.width();
  const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
  TileGeometry g{};
  g.period = folded ? 1 : lines.period;
  g.lines_of_span = jax_softmax::lines_of_span(lines, tile, footprint);
  g.lines_of_block = static_cast<int64_t>(tile.lines_at_once) * tile.lines_of_thread;
  g.parts_of_section = ceil_div(folded ? g.lines_of_span : g.lines_of_span * lines.spans, g.lines_of_block);
  g.parts = folded ? g.parts_of_section * lines.spans : g.parts_of_section;
  g.tiles_of_line = ceil_div(lines.elements, tile.elements);
  g.reach = tile.aligned || folded ? 0 : width - 1;
  g.rows = static_cast<int64_t>(tile.matrices) * tile.elements + g.reach;
  g.threads_of_matrix = static_cast<int64_t>(tile.packs) * tile.lines_at_once;

  g.line_in_pack = folded && tile.packs == 1 && tile.aligned;
  g.states_of_thread = g.line_in_pack ? lines.elements : width;
  g.states_of_line = g.line_in_pack ? 1 : tile.fold;
  const bool shuffles = g.period == 1 && tile.lines_at_once > 1 && tile.packs < 32 && power_of_2(tile.packs) &&
                        power_of_2(tile.lines_at_once);
  g.lines_summed = !shuffles ? 1 : g.threads_of_matrix < 32 ? tile.lines_at_once : 32 / tile.packs;
  g.sets = tile.lines_at_once / g.lines_summed;
  g.states_of_set = tile.packs * g.states_of_thread;
  g.states_of_row = g.sets * g.states_of_line;
  g.lanes_of_row = 1;
  while (g.lanes_of_row < 32 && 2 * g.lanes_of_row * g.rows <= tile.threads && 2 * g.lanes_of_row <= g.states_of_row) {
    g.lanes_of_row *= 2;
  }
  const bool cluster = tile.in_shared && g.parts > 1;
  g.private_states = tile.in_shared && !cluster && g.states_of_row == 1 && !footprint.row_operands;

  g.packs_in_shared = tile.in_shared ? static_cast<int64_t>(tile.lines_of_thread) * tile.threads * footprint.inputs : 0;
  g.states_before_rows = larger(g.sets * tile.matrices * g.states_of_set, cluster ? g.parts * g.rows : 0);
  const int64_t states = g.private_states ? 0 : g.states_before_rows + g.rows;
  g.shared_bytes = g.packs_in_shared * kPackBytes + states * footprint.state_bytes;

  g.matrices = tile.matrices;
  g.elements_of_line = lines.elements;
  return g;
}

}  // namespace jax_softmax
