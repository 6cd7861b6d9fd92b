// The schedule `tile`, for rows that are not contiguous: a block, or the blocks of a cluster, hold neighbouring rows in
// shared memory. geometry/tile.h has a drawing. The schedule `twice` uses TileStates too.
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
  if constexpr (!States::kPrivate) {
    part.combine([&](int row, const State& state) { part.whole(row) = state; });
    __syncthreads();
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    // Every block writes its states into the shared memory of all blocks, over the sets, which are no longer needed.
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
  if constexpr (Op::kElementResults) part.finish();
}

}  // namespace jax_softmax::device
