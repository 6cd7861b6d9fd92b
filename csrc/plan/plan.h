// Which kernel runs a view on a GPU: a plan is a small struct of its schedule. Plain C++: no device, no XLA.
//
// Each schedule has a file here, with its thresholds, and one in device/, with its kernel. What a struct's fields say
// are constants of the kernel: `each` names them, the same way for the generated source, for `explain` and for tests.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/op.h"
#include "geometry/view.h"

namespace jax_softmax {

inline constexpr int kPackBytes = 16;        // what memory is read and written by
inline constexpr int kSectorBytes = 32;      // of the last cache: what memory is written by in the end
inline constexpr int kCacheLineBytes = 128;  // of the last cache

// What a planner needs to know of a GPU.
struct Device {
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int shared_memory_per_block;  // bytes, opted in
  int largest_cluster;          // blocks; 1 where there are no clusters
};

// And of a call.
struct Problem {
  View view;
  std::vector<Strides> sides;  // of the operands that broadcast
  Cost cost;
  int in_bytes, out_bytes;  // of an element, and of its first result
  bool wide;                // whether the arithmetic is float64's
  bool masked;
  bool fused;    // whether there are expressions
  bool plain;    // whether memory can hold pads, and be compared as it is: of 16 bits or more, and loaded as it is
  bool packs;    // whether all operands begin with a whole pack
  bool scratch;  // whether there is memory for blocks to exchange states through

  int width() const { return kPackBytes / in_bytes; }  // elements of a pack
  int value_bytes() const { return wide ? 8 : 4; }     // of the arithmetic
  // Of a pivot and sums, in whole words of 64 bits: see ops.h.
  int state_bytes() const { return (value_bytes() * (1 + cost.sums) + 7) / 8 * 8; }
};

// A row in the registers of a team of lanes, or several in a lane's pack.
struct Registers {
  int lanes;     // that share a row
  int packs;     // of each operand that a lane holds
  int threads;   // of a block
  int boundary;  // bytes: a run's packs are counted from the multiple of so many that it begins at or after; 0: its own
  int unused;    // bytes of shared memory that a block asks for so that no more blocks run at once

  template <class F>
  void each(F f) const {
    f("lanes", lanes), f("packs", packs), f("threads", threads), f("boundary", boundary), f("unused", unused);
  }
};

// Short rows side by side in shared memory.
struct Staged {
  int rows;     // of a block
  int lanes;    // that share a row
  int held;     // elements that a lane has room for
  int threads;  // of a block
  bool pairs;   // whether lanes have two elements at once
  int spread;   // a power of 2: how many rows apart those lie that a warp has pairs of

  template <class F>
  void each(F f) const {
    f("rows", rows), f("lanes", lanes), f("held", held), f("threads", threads), f("pairs", pairs), f("spread", spread);
  }
};

// A row in the shared memory of blocks, chunk by chunk.
struct Chunks {
  int chunks;           // of a row
  int share;            // packs of each operand in one
  int team_threads;     // that have one
  int teams;            // of a block
  int cluster;          // blocks of a cluster
  bool through_memory;  // whether blocks exchange states through memory, so that they need not be a cluster
  int boundary;         // as of Registers

  template <class F>
  void each(F f) const {
    f("chunks", chunks), f("share", share), f("team_threads", team_threads), f("teams", teams), f("cluster", cluster);
    f("through_memory", through_memory), f("boundary", boundary);
  }
};

// The same chunks, passing through rings in the shared memory of blocks that stay.
struct Ring {
  int chunks;        // of a row
  int share;         // packs of each operand in one
  int team_threads;  // that have one
  int stages;
  int summers, writers;  // teams
  int waiters;           // warps
  int copies;            // chunks that are copied at once
  int boundary;          // as of Registers

  template <class F>
  void each(F f) const {
    f("chunks", chunks), f("share", share), f("team_threads", team_threads), f("stages", stages);
    f("summers", summers), f("writers", writers), f("waiters", waiters), f("copies", copies), f("boundary", boundary);
  }
};

// Neighbouring rows, a part of each line, in the shared memory of a block or of a cluster's: see device/tile.cuh.
struct Tile {
  int threads;   // of a block
  int arrays;    // neighbouring arrays of which a tile has all rows, if more than one
  int elements;  // of a line of the view, in a tile
  int fold;      // lines of the view that are one of the tile's
  int packs;     // of a line of the tile
  int groups;    // of threads that share out the lines
  int turns;     // lines of a thread
  bool aligned;  // whether all lines, or folded runs of them, begin with whole packs
  bool held;     // whether lines are held in shared memory, or else read where they are

  template <class F>
  void each(F f) const {
    f("threads", threads), f("arrays", arrays), f("elements", elements), f("fold", fold), f("packs", packs);
    f("groups", groups), f("turns", turns), f("aligned", aligned), f("held", held);
  }
};

// A row read twice, in pieces.
struct Twice {
  int pieces;      // of a row
  int64_t share;   // packs of each operand in one
  int finished;    // packs of each operand that a thread finishes
  int threads;     // of a block
  bool one_block;  // whether a block has a whole row, without memory for states
  int boundary;    // as of Registers

  template <class F>
  void each(F f) const {
    f("pieces", pieces), f("share", share), f("finished", finished), f("threads", threads), f("one_block", one_block);
    f("boundary", boundary);
  }
};

// A tile read twice, in pieces.
struct TwiceTile {
  Tile tile;       // a piece
  int finished;    // lines of a thread that finishes a smaller one
  bool one_block;  // as of Twice

  template <class F>
  void each(F f) const {
    tile.each(f);
    f("finished", finished), f("one_block", one_block);
  }
};

using Plan = std::variant<Registers, Staged, Chunks, Ring, Tile, Twice, TwiceTile>;
inline constexpr const char* kScheduleNames[] = {"registers", "staged", "chunks", "ring", "tile", "twice", "twice"};

// The fastest plan that fits, or none where a view is beyond all of them. Which elements are added up in which order
// depends on the row alone, never on how many rows there are.
std::optional<Plan> make_plan(const Problem& problem, const Device& device);

// Whether the plan is worth a custom call, which XLA does not fuse with what is around it: at least 5 % faster than
// XLA's own reductions.
bool faster_than_xla(const Plan& plan, const Problem& problem);

// Bytes of memory that the plan needs for blocks to exchange states through.
int64_t scratch_bytes(const Plan& plan, const Problem& problem);

// ---- each schedule's own: the plan, if it fits

std::optional<Registers> plan_registers(const Problem& problem, const Device& device);
std::optional<Staged> plan_staged(const Problem& problem, const Device& device);
int64_t shared_bytes_of(const Staged& plan, const Problem& problem);
std::optional<Chunks> plan_chunks(const Problem& problem, const Device& device);
std::optional<Ring> plan_ring(const Problem& problem, const Device& device);
std::optional<Tile> plan_tile(const Problem& problem, const Device& device);
std::optional<Twice> plan_twice(const Problem& problem, const Device& device);
std::optional<TwiceTile> plan_twice_tile(const Problem& problem, const Device& device);

// How a block is launched, and how many of them a multiprocessor is to have room for in registers (0: as it comes).
struct Launch {
  int64_t blocks;
  int threads;
  int cluster = 1;
  int64_t shared_bytes = 0;
  int resident = 0;
  bool cooperative = false;  // all blocks run at once
  bool overlaps = false;     // may start before the previous kernel has ended, which it waits for itself
};

// A kernel and its launch; a plan is one or more of them, in order.
struct Step {
  const char* function;  // of device/
  Launch launch;
  int64_t rows;  // Operands::rows
};
std::vector<Step> steps_of(const Plan& plan, const Problem& problem, const Device& device);

// "registers lanes=32 packs=4 ..."
std::string describe(const Plan& plan);

// ---- small things

// How a row is covered with packs; see device/row.cuh.
struct Runs {
  int64_t run, runs;  // elements of a run, and runs of a row
  bool aligned;       // whether all begin with a pack of their own
  int boundary;       // where packs are counted from, if not
  int64_t run_packs, packs;
};
Runs runs_of(const Problem& problem, int boundary);

// Short rows that a pack has several whole ones of, or 1.
int rows_of_pack(const Problem& problem);

}  // namespace jax_softmax
