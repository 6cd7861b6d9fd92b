// The plan: how a call's shape and axes become a canonical view, and which schedule runs it. Plain C++: no device, no
// XLA. Every threshold of the package stands in plan.cc, plan_tile.cc and tile_shape.cc.
#pragma once

#include <cstdint>
#include <string>

namespace jax_softmax {

inline constexpr int kMaxDims = 12;

enum class Op { kSoftmax, kLogSoftmax, kSoftmaxLinear, kLogSoftmaxJvp, kLogSoftmaxVjp };
enum class DType { kF16, kBF16, kF32, kF64 };

inline constexpr int kOps = 5;
inline constexpr const char* kOpNames[kOps] = {"softmax", "log_softmax", "softmax_linear", "log_softmax_jvp",
                                               "log_softmax_vjp"};
inline constexpr int kDTypes = 4;
inline constexpr const char* kDTypeNames[kDTypes] = {"float16", "bfloat16", "float32", "float64"};
inline constexpr int kDTypeBytes[kDTypes] = {2, 2, 4, 8};

constexpr int inputs_of(Op op) { return op == Op::kSoftmax || op == Op::kLogSoftmax ? 1 : 2; }

// A canonical dimension: extent, and the strides in elements of the operands and of the mask.
struct Dim {
  int64_t extent;
  int64_t stride;
  int64_t mask_stride;  // 0 where the mask is broadcast
};

struct Dims {
  int size = 0;
  Dim dim[kMaxDims];
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < size; ++i) n *= dim[i].extent;
    return n;
  }
};

// The canonical view: dimensions of extent 1 dropped, neighbours of the same role merged where the mask allows it,
// kept and reduced dimensions each listed from the outermost to the innermost.
struct View {
  Dims kept;
  Dims reduced;
  bool minor_reduced;  // whether the innermost dimension of all is a reduced one
  int64_t rows;        // product of the kept extents
  int64_t columns;     // product of the reduced extents: the length of a row
  bool masked;

  bool contiguous_rows() const { return minor_reduced && reduced.size == 1; }
};

// `shape` and `mask_shape` have `rank` entries (mask_shape is null without a mask; its entries are the shape's or 1).
// `axes` are `n_axes` distinct numbers in [0, rank). Returns an error message, empty when all is well.
std::string make_view(const int64_t* shape, const int64_t* mask_shape, int rank, const int64_t* axes, int n_axes,
                      View* view);

// What the plan needs to know of a GPU.
struct Device {
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int shared_memory_per_block;  // bytes, opted in
  int largest_cluster;          // blocks; 1 where there are no clusters
};

enum class Schedule {
  kPacks,       // several rows in a pack of 16 bytes, or in two of them
  kSlab,        // unaligned rows side by side in shared memory, a row in the registers of up to 32 lanes
  kLanes,       // a row in the registers of up to 32 lanes of a warp
  kBlock,       // a row in the registers of a block
  kChunks,      // a row in the shared memory of blocks, in chunks
  kRing,        // the same chunks, passing through a ring in the shared memory of blocks that stay
  kPasses,      // a row read twice, in pieces
  kStream,      // a row read twice by a block
  kTile,        // neighbouring rows in the shared memory of blocks, each thread having a pack of some lines
  kTilePasses,  // the same, of rows too long for that or slower so: read twice, in pieces
  kStrips,      // rows of few elements in few lines, or small arrays of them: the shared memory of a block has parts
  kGather,      // minor axis reduced, but the row is not contiguous
  kColumns,     // minor axis kept: neighbouring columns side by side
};
inline constexpr const char* kScheduleNames[] = {"packs",  "slab",   "lanes",  "block", "chunks",
                                                 "ring",   "passes", "stream", "tile",  "tile_passes",
                                                 "strips", "gather", "columns"};

// Which checks the packs that cover a row need: none, since the threads' packs are exactly the row's; whether a pack
// belongs to the row; which of its elements do; or that, by larger teams, in rows of two operands in so many chunks
// that rings would wait for small ones.
enum class Edges { kNone, kWhole, kParts, kPartsOfMany };
inline constexpr const char* kEdgesNames[] = {"none", "whole", "parts", "parts_of_many"};

// How the kernels are laid out; the plan's numbers are in these units.
inline constexpr int kPackBytes = 16;
// A team has a chunk of a row, of up to 16 KB of all operands. Where it looks at the edges of rows, which need not
// begin with a whole pack, fewer threads share the cost of that, and each may have a pack more; but they take longer.
constexpr int chunk_packs(int inputs, Edges edges) { return edges == Edges::kParts ? 9 : 8 / inputs; }
constexpr int chunk_threads(int inputs, Edges edges) { return edges == Edges::kParts ? 128 / inputs : 128; }
inline constexpr int kMostTeams = 4;    // in a block of the chunks schedule
inline constexpr int kMostBlocks = 16;  // in a cluster
inline constexpr int kMostStages = 16;  // of a ring
inline constexpr int kRingSummers = 3;  // teams of a ring that sum terms
inline constexpr int kRingWriters = 2;  // teams of a ring that write results
inline constexpr int kRingCopies = 4;   // chunks that a ring copies at once
constexpr int ring_threads(int inputs, Edges edges) {
  return (kRingSummers + kRingWriters) * chunk_threads(inputs, edges) + 3 * 32;
}
inline constexpr int kColumnsTogether = 4;  // of a thread, in the columns schedule
inline constexpr int kPassThreads = 256;
inline constexpr int kSlabThreads = 128;
inline constexpr int kPacksThreads = 256;  // at the most
inline constexpr int kSectorBytes = 32;    // of the last cache: what memory is written by
inline constexpr int kLineBytes = 128;     // of the last cache
inline constexpr int kLinePacks = kLineBytes / kPackBytes;
inline constexpr int kTileThreads = 256;
inline constexpr int kOffsetBytes = 16;    // of a listed line, for its element and its mask's
inline constexpr int kStripThreads = 256;  // at the most
// Columns that a thread of a strip holds at once, with room for so many elements of each.
constexpr int strip_columns(int held, int inputs) { return held < 16 ? 32 / held / inputs : 1; }
// Places that each lane leaves free in a strip's tables, so that lanes do not get into each other's way.
inline constexpr int kStripSpare = 4;
inline constexpr int kTilePassThreads = 256;
inline constexpr int kTilePassStages = 2;  // of copies ahead of the arithmetic
inline constexpr int kTilePassPacks = 8;   // of a thread, of all operands together, in a stage

// The tile schedule's: see cuda/tile.cuh. Memory is seen as lines, a segment of neighbouring elements for each index of
// the kept dimensions in `kept` and of the reduced ones in `lines`. A segment is made of
//   the innermost kept dimension, a row to an element;
//   that and the innermost reduced one inside of it, a row to `inner` elements;
//   a part of a run: of the innermost reduced one and the `inner` elements inside of it, `group` to a row;
//   or, in strips, units: `inner` elements of a row, or small arrays that follow one another.
struct Tile {
  Dims kept;
  Dims lines;
  Dims sets;                       // of lines, that rows read twice have; each begins as it will in a pack,
  int full_sets;                   // and those from this one on have the last of its outermost lines not
  int64_t segment;                 // elements
  int64_t run;                     // elements of the whole run that segments are parts of; 0 where they are not
  int64_t inner, group;            // elements
  int64_t outer_mask, inner_mask;  // mask strides of a position in the segment or run, by and within `inner`; by units
  bool separate;                   // whether the elements of a pack belong to different rows
  bool spanning;                   // whether a tile's packs may be of several segments
  int packs;                       // of each line in a tile
  int width;                       // elements of each line in a tile, if not spanning; in strips, units
  int halo;                        // elements beyond those that are read too, so that whole packs are stored
  int turn, last_lines;            // if neither, and `lines` has several dimensions, the last one of whole turns: how
                                   // far apart lines are that take turns to begin alike in a pack, or 0 if they come in
                                   // sets, and its extent without the rest
  int offsets_at;                  // then: bytes to the list of where lines begin
  int64_t segment_packs, all_packs;  // if spanning
  int segments, unit;                // if segments are parts of runs: how many in a tile, and packs of each
  int64_t all_segments;
  int segment_tiles;           // if not, nor spanning: tiles of a segment
  int64_t segment_units;       // in strips: of `unit` elements, which have parts of `columns` rows; each of these has
  Dims in_unit, in_line;       // `inner` elements of a line, and begins there and has them at the offsets of these
  int groups;                  // of threads, which take turns at the lines
  int held;                    // lines that a thread holds; in strips, elements of a row
  int all_lines, block_lines;  // of a row or set, and of those a block's
  int cluster;                 // blocks that share a tile, or pieces of it that are read one by one,
  int set_pieces;              // and of those each set's
  int64_t tiles;
  int shuffled;             // whether lanes add up first, or how many neighbouring ones if all have one state
  bool exchanged;           // whether several threads share a row still
  int entry_rows, entries;  // states that are exchanged: by group or warp, and in each
  int positions;            // positions that are told apart
  int finals_at;            // bytes from the entries to what is made of them,
  int of_blocks_at;         // to the states of a cluster's blocks,
  int received_at;          // and to the barrier that counts those
  int team;                 // lanes that add up the entries of a row; in strips, that hold it
  int columns;              // rows of the view in a tile
};

struct CudaPlan {
  Schedule schedule;
  Edges edges;
  int lanes;         // threads that share a row
  int packs;         // 16-byte packs of each operand that a thread holds, in slabs and strips elements (0: no register)
  int threads;       // threads a block
  int cluster;       // blocks of a cluster
  int slab_rows;     // rows that a block handles together
  int slab_spread;   // a power of 2: how many rows apart those lie that a warp has side by side
  int slab_inner;    // neighbouring rows that are interleaved; 0 where rows are runs of memory
  bool slab_pad;     // whether interleaved rows lie a pack apart in shared memory from the next
  int64_t blocks;    // blocks in the grid, of the launch that reads first if several do
  int shared_bytes;  // dynamic shared memory of a block
  int boundary;      // bytes: a row's packs are counted from the multiple of so many that it begins at or after
  int chunks;        // parts that a row is cut into
  int64_t share;     // packs of each operand in such a part
  int stages;        // of a ring,
  int spare;         // each with room for so many packs of each operand more than a share
  int again;         // chunks of a row that a ring does not hold, and reads twice
  Tile tile;         // of the tile schedule
  bool scratch;      // whether blocks exchange the states of the parts through device memory
};

// How far the operands begin beyond a multiple of 16 bytes: not at all, all by the same, or differently.
enum class Alignment { kAligned, kAlike, kMixed };

// Which elements are added up in which order depends on the row alone, never on how many rows there are. `scratch` says
// whether there are scratch_bytes of device memory.
CudaPlan make_cuda_plan(const View& view, Op op, DType dtype, Alignment alignment, const Device& device, bool scratch);

// The most device memory that a call needs to exchange states, on whatever device.
int64_t scratch_bytes(const View& view, Op op, DType dtype);

}  // namespace jax_softmax
