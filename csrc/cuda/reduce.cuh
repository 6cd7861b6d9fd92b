// Reductions over the threads that share a row: some lanes of a warp, or a block.
#pragma once

#include "ops.h"

namespace jax_softmax::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;

template <int kLanes, class M>
__device__ __forceinline__ typename M::Value max_over_lanes(typename M::Value x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x = M::max(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

template <int kLanes, class C>
__device__ __forceinline__ C sum_over_lanes(C x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

// The state of kLanes lanes' rows, each lane's relative to its own pivot.
template <class Op, class M, int kLanes>
__device__ __forceinline__ State<typename M::Value> combine_over_lanes(State<typename M::Value> state) {
  if constexpr (Op::kHasPivot) {
    const auto pivot = max_over_lanes<kLanes, M>(state.pivot);
    state.sum *= Relative<M>(pivot).rescale(state.pivot);
    state.pivot = pivot;
  }
  state.sum = sum_over_lanes<kLanes>(state.sum);
  return state;
}

// kLanes lanes of a warp share a row.
template <class Op_, class M_, int kLanes>
struct LaneGroup {
  using Op = Op_;
  using M = M_;
  using C = typename M::Value;
  __device__ __forceinline__ int rank() const { return threadIdx.x % kLanes; }
  __device__ __forceinline__ int size() const { return kLanes; }
  // The threads among which terms are taken relative to one pivot.
  __device__ __forceinline__ C warp_max(C x) const { return max_over_lanes<kLanes, M>(x); }
  __device__ __forceinline__ C warp_sum(C x) const { return sum_over_lanes<kLanes>(x); }
  // The row's state, from the state of each warp's share of it.
  __device__ __forceinline__ State<C> combine_warps(State<C> warp) const { return warp; }
};

// A block shares a row. Each object allows one call of combine_warps.
template <class Op_, class M_>
struct BlockGroup {
  using Op = Op_;
  using M = M_;
  using C = typename M::Value;
  __device__ __forceinline__ int rank() const { return threadIdx.x; }
  __device__ __forceinline__ int size() const { return blockDim.x; }
  __device__ __forceinline__ C warp_max(C x) const { return max_over_lanes<32, M>(x); }
  __device__ __forceinline__ C warp_sum(C x) const { return sum_over_lanes<32>(x); }
  __device__ __forceinline__ State<C> combine_warps(State<C> warp) const {
    __shared__ State<C> part[32];
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) part[threadIdx.x / 32] = warp;
    __syncthreads();
    return combine_over_lanes<Op, M, 32>(lane < warps ? part[lane] : identity<Op, M>());
  }
};

}  // namespace jax_softmax::cuda
