// The schedule `tile`, for rows that are not runs of memory: a block, or the blocks of a cluster, hold neighbouring
// rows in shared memory, read once and written once.
//
// Memory is seen as lines: for each index of the reduced dimensions the elements of all kept ones inside of them, each
// of another row. A tile is the same part of each line, and so has some rows. A thread has one pack of some of the
// lines, and a state for each element of it. Lines may begin anywhere in a pack: a thread then has lines that begin
// alike, and which rows its elements are of depends on that.
//
// Where lines are short and follow one another, several are folded into one of whole packs, all of an array is one run
// of memory, and a tile is one or more arrays. A row then has several elements of the folded line.
//
// What a thread has of a tile's memory is a `TilePart`, in tile_part.cuh, and what it knows of the tile's rows
// `TileStates`, in tile_states.cuh. The schedule `twice` has them as well.
#pragma once

#include "device/exchange.cuh"
#include "device/tile_states.cuh"

namespace jax_softmax::device {

template <class Mem, class Plan>
__device__ __forceinline__ void tile(const typename Mem::Operands& operands) {
  using Part = TilePart<Mem, Plan>;
  using States = TileStates<Mem, Plan>;
  using Op = typename Mem::Op;
  using State = StateOf<Op>;
  constexpr int kCluster = Part::kParts, kRows = Part::kRows;  // blocks that share a tile
  extern __shared__ __align__(128) Pack shared[];
  const Mem mem{operands};
  const int64_t index = blockIdx.x / kCluster;
  const int rank = static_cast<int>(blockIdx.x - index * kCluster);
  States part(mem, shared, index, rank);
  part.copy();
  part.finish_copy();
  part.sum_held();
  constexpr bool kAlone = kCluster == 1 && States::kAlone;
  if constexpr (!kAlone) {
    part.combine([&](int row, const State& state) { part.whole(row) = state; });
    __syncthreads();
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    // Every block tells all others, in the place of states that have been put together.
    __shared__ uint64_t received;
    const WordsInCluster<State> exchange{reinterpret_cast<uint64_t*>(part.states), &received};
    begin_exchange(&received, kCluster * kRows * static_cast<int>(sizeof(State)));
    wait_until_all_have_begun();
    for (int i = threadIdx.x; i < kRows * kCluster; i += Part::kThreads) {
      const int block = i / kRows, row = i - block * kRows;
      exchange.publish(rank * kRows + row, part.whole(row), block);
    }
    wait_for_cluster(&received, 0);
    __syncthreads();  // the block's own states have been read
    for (int row = threadIdx.x; row < kRows; row += Part::kThreads) {
      part.whole(row) = combine_all<Op>(0, kCluster, 1, [&](int block) { return exchange.state(block * kRows + row); });
    }
    __syncthreads();
  }
#endif
  if (rank == 0) part.store_rows();
  if constexpr (Op::kElementResults) part.template finish<!kAlone>();
}

}  // namespace jax_softmax::device
