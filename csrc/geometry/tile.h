// The geometry of a tile: neighbouring rows that are not runs of memory. Here a view with kept, reduced and kept
// dimensions of extents 2, 8 and 40, packs of 4 elements, and a tile of 16 elements of each line:
//
//                       a line: 40 elements, each of another row
//                 +-----------------+-----------------+---------+
//   8 lines of    | p p p p         |                 |         |   A tile is the same part of each line of a matrix,
//   and a matrix:     | q q q q         |                 |         |   so has 16 rows, one to a column of this
//   drawing. a row has     | p p p p         |                 |         | an element    | q q q q         | | |   A
//   thread has one pack of some of the lines: here of each       | p p p p         |                 |         | packs
//   = 4, lines_at_once = 2, so that 8 threads have
//                 | q q q q         |                 |         |   lines_of_thread = 4 each, and an accumulator for
//                 each | p p p p         |                 |         |   of the 4 elements of their pack. The
//                 accumulators of | q q q q         |                 |         |   p and q, in the same place, are
//                 those of one row.
//                 +-----------------+-----------------+---------+
//                       a tile           a tile        the rest
//   and the second matrix below.
//
// Where a tile has more lines than a block has room for, a cluster's blocks have a part each; or, if it is read twice,
// blocks have pieces of it one by one.
//
// Lines may begin anywhere in a pack. A thread then has lines that begin alike, `period` lines apart, and a tile has
// some elements of its neighbour too, which its last packs reach into.
//
// Where lines are short, `fold` lines that follow one another are one line of the tile, of whole packs, all of a matrix
// is one run of memory, and a tile is one matrix or several. A row then has several elements of a folded line.
#pragma once

#include "geometry/view.h"

namespace jax_softmax {

struct Tile {
  int threads;          // of a block
  int matrices;         // neighbouring ones that a tile has all rows of, if more than one
  int elements;         // of a line of the view, in a tile
  int fold;             // lines of the view that are one of the tile's
  int packs;            // of a line of the tile
  int lines_at_once;    // that the threads of a matrix have
  int lines_of_thread;  // one after the other
  bool aligned;         // whether all lines, or folded runs of them, begin with whole packs
  bool in_shared;       // whether lines are kept in shared memory, or else read where they are

  template <class F>
  constexpr void each(F f) const {
    f("threads", threads), f("matrices", matrices), f("elements", elements), f("fold", fold), f("packs", packs);
    f("lines_at_once", lines_at_once), f("lines_of_thread", lines_of_thread), f("aligned", aligned);
    f("in_shared", in_shared);
  }
};

// How a view's memory looks as lines.
struct Lines {
  int64_t elements;    // of a line
  int64_t neighbours;  // lines that are neighbours in memory: the innermost reduced extent
  int64_t spans;       // of so many lines, of a matrix: the other reduced extents' product
  bool aligned;        // whether all lines begin with whole packs
  int period;          // lines so many apart begin alike in a pack

  constexpr int64_t run() const { return neighbours * elements; }  // elements of a span
};

constexpr bool power_of_2(int64_t n) { return (n & (n - 1)) == 0; }
constexpr int64_t next_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}
constexpr int64_t common_divisor(int64_t a, int64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

constexpr Lines lines_of(const View& view, const Footprint& call) {
  const int width = call.width();
  const Dim& innermost = view.reduced.innermost();
  Lines lines{innermost.stride, innermost.extent, view.columns / innermost.extent, true, 1};
  bool aligned = lines.elements % width == 0;
  for (int i = 0; i < view.reduced.size; ++i) aligned &= view.reduced.dim[i].stride % width == 0;
  for (int i = 0; i < view.outer_kept(); ++i) aligned &= view.kept.dim[i].stride % width == 0;
  lines.aligned = aligned || !call.packs;  // or elements are accessed one by one
  if (!lines.aligned) lines.period = static_cast<int>(width / common_divisor(width, lines.elements));
  return lines;
}

// Lines of the tile that a span has: of whole periods, or folded ones.
constexpr int64_t lines_of_span(const Lines& lines, const Tile& tile, const Footprint& call) {
  if (tile.fold == 1) return round_up(lines.neighbours, lines.period);
  const int64_t before = tile.aligned ? 0 : call.width() - 1;  // elements, of the pack that the span begins in
  return ceil_div(lines.run() + before, static_cast<int64_t>(tile.packs) * call.width());
}

// What a tile means for a view. A state is the accumulator of a row, or of a part of one.
struct TileGeometry {
  // Lines.
  int64_t period;          // as of Lines, or 1 if folded
  int64_t lines_of_span;   // with some that are not there, so that periods are whole
  int64_t lines_of_block;  // of them
  // Blocks share out the lines of all spans together or, if folded, those of each span.
  int64_t parts_of_section;
  int64_t parts;          // of a tile: a cluster's blocks, or the pieces of one that is read twice
  int64_t tiles_of_line;  // tiles that share a line
  int64_t reach;          // elements of the next tile that the last packs may reach into
  int64_t rows;           // that a tile has states of
  int64_t threads_of_matrix;

  // States, which threads have for the elements of their packs.
  bool line_in_pack;         // whether a pack is a folded line, so that its elements of one row share a state
  int64_t states_of_thread;  // or else one for each element
  int64_t states_of_line;    // that a folded line has of a row
  int64_t lines_summed;      // of lines_at_once, those whose states lanes of a warp put together by shuffles
  int64_t sets;              // of states that a matrix's threads leave in shared memory to be put together
  int64_t states_of_set;
  int64_t states_of_row;  // in all sets
  int64_t lanes_of_row;   // that put them together
  bool alone;             // whether a thread's states are whole rows' and nobody else needs to know them

  // Shared memory: lines, then states of threads or of a cluster's blocks, then those of whole rows.
  int64_t packs_in_shared;
  int64_t states_before_rows;
  int64_t shared_bytes;

  // Of a view with so many rows.
  int64_t matrices;          // of a tile
  int64_t elements_of_line;  // of the view
  constexpr int64_t tiles(int64_t view_rows) const {
    return ceil_div(view_rows / elements_of_line, matrices) * tiles_of_line;
  }
};

constexpr TileGeometry geometry_of(const View& view, const Tile& tile, const Footprint& call) {
  const Lines lines = lines_of(view, call);
  const bool folded = tile.fold > 1;
  const int width = call.width();
  const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
  TileGeometry g{};
  g.period = folded ? 1 : lines.period;
  g.lines_of_span = jax_softmax::lines_of_span(lines, tile, call);
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
  g.alone = tile.in_shared && !cluster && g.states_of_row == 1 && !call.row_operands;

  g.packs_in_shared = tile.in_shared ? static_cast<int64_t>(tile.lines_of_thread) * tile.threads * call.inputs : 0;
  g.states_before_rows = larger(g.sets * tile.matrices * g.states_of_set, cluster ? g.parts * g.rows : 0);
  const int64_t states = g.alone ? 0 : g.states_before_rows + g.rows;
  g.shared_bytes = g.packs_in_shared * kPackBytes + states * call.state_bytes;

  g.matrices = tile.matrices;
  g.elements_of_line = lines.elements;
  return g;
}

}  // namespace jax_softmax
