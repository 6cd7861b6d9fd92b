// Reductions over the lanes of a warp and over a block.
#pragma once

#include "device/math.cuh"

namespace jax_softmax::device {

inline constexpr unsigned kFullWarp = 0xffffffffu;

template <int kLanes, class M>
__device__ __forceinline__ typename M::Value max_over_lanes(typename M::Value x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x = M::max(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

// The sum of the lane whose number differs in the bit `offset`.
template <class Sum>
__device__ __forceinline__ Sum shuffled(Sum sum, int offset) {
  float numbers[sizeof(Sum) / sizeof(float)];
  memcpy(numbers, &sum, sizeof(Sum));
#pragma unroll
  for (float& number : numbers) number = __shfl_xor_sync(kFullWarp, number, offset);
  memcpy(&sum, numbers, sizeof(Sum));
  return sum;
}

template <int kLanes, class Sum>
__device__ __forceinline__ Sum sum_over_lanes(Sum x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += shuffled(x, offset);
  return x;
}

// Combines the states of kLanes lanes, each relative to a pivot of its own.
template <class Op, int kLanes>
__device__ __forceinline__ StateOf<Op> combine_over_lanes(StateOf<Op> state) {
  using M = typename Op::Policy;
  if constexpr (Op::kHasPivot) {
    const auto pivot = max_over_lanes<kLanes, M>(state.pivot);
    state.sum = rescaled(state.sum, Relative<M>(pivot), state.pivot);
    state.pivot = pivot;
  }
  state.sum = sum_over_lanes<kLanes>(state.sum);
  return state;
}

// kLanes neighbouring threads that share a row: up to a warp, or a whole block. Terms are relative to the maximum of a
// warp's elements. `combine` may be called once in a kernel.
template <class Op_, int kLanes, int kThreads>
struct Team {
  using Op = Op_;
  using C = typename Op::C;
  using Sum = typename Op::Sum;
  using M = typename Op::Policy;
  static constexpr bool kBlock = kLanes > 32;
  static constexpr int kShuffled = kBlock ? 32 : kLanes;
  static __device__ __forceinline__ int rank() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ C warp_max(C x) { return max_over_lanes<kShuffled, M>(x); }
  static __device__ __forceinline__ Sum warp_sum(const Sum& x) { return sum_over_lanes<kShuffled>(x); }
  // The row's state, from the state of each warp.
  static __device__ __forceinline__ StateOf<Op> combine(const StateOf<Op>& warp) {
    if constexpr (kBlock) {
      constexpr int kWarps = kThreads / 32;
      __shared__ StateOf<Op> part[kWarps];
      const int lane = threadIdx.x % 32;
      if (lane == 0) part[threadIdx.x / 32] = warp;
      __syncthreads();
      return combine_over_lanes<Op, 32>(lane < kWarps ? part[lane] : identity<Op, M>());
    } else {
      return warp;
    }
  }
};

// Combines a state with those of n parts.
template <class Op, int n>
__device__ __forceinline__ StateOf<Op> combine_parts(StateOf<Op> state, const StateOf<Op> (&part)[n]) {
  using M = typename Op::Policy;
  auto pivot = state.pivot;
  if constexpr (Op::kHasPivot) {
#pragma unroll
    for (int i = 0; i < n; ++i) pivot = M::max(pivot, part[i].pivot);
  }
  const Relative<M> relative(pivot);
  if constexpr (Op::kHasPivot) state.sum = rescaled(state.sum, relative, state.pivot);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (Op::kHasPivot) {
      state.sum += rescaled(part[i].sum, relative, part[i].pivot);
    } else {
      state.sum += part[i].sum;
    }
  }
  return {pivot, state.sum};
}

// Combines the states of the parts begin, begin + step, ... below end, of which kTogether are read at once.
template <class Op, class Part>
__device__ __forceinline__ StateOf<Op> combine_all(int begin, int end, int step, Part part) {
  using M = typename Op::Policy;
  constexpr int kTogether = 4;
  auto state = identity<Op, M>();
  for (int i = begin; i < end; i += kTogether * step) {
    StateOf<Op> some[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) some[u] = i + u * step < end ? part(i + u * step) : identity<Op, M>();
    state = combine_parts<Op>(state, some);
  }
  return state;
}

}  // namespace jax_softmax::device
