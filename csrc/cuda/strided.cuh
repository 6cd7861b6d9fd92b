// Schedules for rows that are not contiguous: any view, each element addressed by itself, read twice.
#pragma once

#include "cuda/access.cuh"
#include "cuda/reduce.cuh"

namespace jax_softmax::cuda {

template <class A>
struct ViewArgs {
  A access;
  View view;
  Strided reduced;  // of no more elements than it counts

  ViewArgs(const A& access, const View& view) : access(access), view(view), reduced(view.reduced) {}
  __device__ __forceinline__ Offset at(int64_t reduced_index) const {
    unsigned ignored;
    return view.columns <= INT32_MAX ? reduced.at(static_cast<unsigned>(reduced_index), &ignored)
                                     : offset_of(view.reduced, view.reduced.size, reduced_index);
  }
};

// Loads n of a row's elements, `step` apart, and pads in the place of what is beyond its end.
template <class A, int n>
__device__ __forceinline__ void load_some(const ViewArgs<A>& args, typename A::C (&values)[n][A::kInputs], Offset row,
                                          int64_t first, int step) {
#pragma unroll
  for (int u = 0; u < n; ++u) {
    const int64_t element = first + u * step;
    if (element < args.view.columns) {
      args.access.load(values[u], row + args.at(element));
    } else {
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) values[u][k] = A::Op::pad(k);
    }
  }
}

// Minor axis reduced: a block shares a row and its threads lie along it.
template <class A>
__global__ void __launch_bounds__(256) gathered_rows(const __grid_constant__ ViewArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  const View& view = args.view;
  const Offset base = offset_of(view.kept, view.kept.size, blockIdx.x);
  State<C> state = identity<Op, M>();
  constexpr int kUnroll = 8 / A::kInputs;
  for (int64_t c = threadIdx.x; c < view.columns; c += kUnroll * blockDim.x) {
    C values[kUnroll][A::kInputs];
    load_some(args, values, base, c, blockDim.x);
    accumulate<Op, M>(state, values);
  }
  const BlockGroup<Op, M> group;
  const auto row = Op::row(group.combine_warps(combine_over_lanes<Op, M, 32>(state)));
  for (int64_t c = threadIdx.x; c < view.columns; c += blockDim.x) {
    const Offset at = base + args.at(c);
    C values[A::kInputs];
    args.access.load(values, at);
    args.access.out[at.element] = args.access.result(Op::finish(row, values), at);
  }
}

// Minor axis kept: a warp lies across columns, neighbours for the most part, some of which a thread has, so that it
// need not find its elements one by one; and the block's warps share the way down.
template <class A>
__global__ void __launch_bounds__(256) columns_side_by_side(const __grid_constant__ ViewArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  constexpr int kWarps = 256 / 32, kTogether = kColumnsTogether, kInputs = A::kInputs;
  constexpr int kUnroll = (sizeof(C) == 8 ? 2 : 4) / kInputs;
  __shared__ State<C> part[kWarps][kTogether * 32];
  const View& view = args.view;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * (kTogether * 32) + lane;
  const auto active = [&](int j) { return column + j * 32 < view.rows; };
  const auto some_active = [&](int j) { return column - lane + j * 32 < view.rows; };  // in the block
  Offset top[kTogether];
  State<C> state[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    top[j] = offset_of(view.kept, view.kept.size, active(j) ? column + j * 32 : 0);
    state[j] = identity<Op, M>();
  }
  for (int64_t r = warp; r < view.columns; r += kUnroll * kWarps) {
    C values[kTogether][kUnroll][kInputs];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t number = r + u * kWarps;
      const bool inside = number < view.columns;
      const Offset line = args.at(inside ? number : r);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (inside && active(j)) {
          args.access.load(values[j][u], top[j] + line);
        } else {
#pragma unroll
          for (int k = 0; k < kInputs; ++k) values[j][u][k] = Op::pad(k);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (some_active(j)) accumulate<Op, M>(state[j], values[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kTogether; ++j) part[warp][j * 32 + lane] = state[j];
  __syncthreads();
  typename Op::Row row[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    state[j] = part[0][j * 32 + lane];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) state[j] = combine<Op, M>(state[j], part[w][j * 32 + lane]);
    row[j] = Op::row(state[j]);
  }
  for (int64_t r = warp; r < view.columns; r += kWarps) {
    const Offset line = args.at(r);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (!active(j)) continue;
      const Offset here = top[j] + line;
      C values[kInputs];
      args.access.load(values, here);
      args.access.out[here.element] = args.access.result(Op::finish(row[j], values), here);
    }
  }
}

}  // namespace jax_softmax::cuda
