// Schedules for contiguous rows: held in registers, held in shared memory, or read twice.
#pragma once

#include "cuda/access.cuh"
#include "cuda/reduce.cuh"

namespace jax_softmax::cuda {

template <class A>
struct RowArgs {
  A access;
  Dims kept;  // where a row's part of the mask lies
  int64_t rows;
  int64_t columns;
  int64_t mask_stride;  // between neighbouring elements of a row

  __device__ __forceinline__ RowOffset offset(int64_t row) const {
    if constexpr (A::kMasked) {
      return {row * columns, offset_of(kept, kept.size, row).mask};
    } else {
      return {row * columns, 0};
    }
  }
};

template <class A>
using Values = typename A::C[A::kWidth][A::kInputs];

template <class A>
__device__ __forceinline__ void widen_packs(Values<A>& values, const Pack<typename A::T> (&raw)[A::kInputs]) {
#pragma unroll
  for (int k = 0; k < A::kInputs; ++k) {
#pragma unroll
    for (int i = 0; i < A::kWidth; ++i) values[i][k] = widen(raw[k].element[i]);
  }
}

template <class A>
__device__ __forceinline__ void finish_pack(typename A::C (&result)[A::kWidth], const typename A::Op::Row& row,
                                            const Pack<typename A::T> (&raw)[A::kInputs]) {
  Values<A> values;
  widen_packs<A>(values, raw);
#pragma unroll
  for (int i = 0; i < A::kWidth; ++i) result[i] = A::Op::finish(row, values[i]);
}

// A row in the registers of a group of threads, packed as it is in memory, or as its terms if the result is made of
// those: all loads first, then the maximum, then the sum relative to the warp's maximum, then one exchange.
template <class A, int kPacks, bool kExact, class Group>
__device__ __forceinline__ void row_in_registers(const RowArgs<A>& args, int64_t row, const Group& group) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  constexpr int kWidth = A::kWidth;
  const A& access = args.access;
  const bool active = row < args.rows;  // the last block's idle threads repeat the last row and store nothing
  const RowOffset offset = args.offset(active ? row : args.rows - 1);
  const int columns = static_cast<int>(args.columns);
  const int shift = kExact ? 0 : access.shift_of(offset);

  Pack<typename A::T> raw[kPacks][A::kInputs];
  unsigned kept[A::kMasked ? kPacks : 1] = {};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = (group.rank() + p * group.size()) * kWidth - shift;
    if (kExact || first < columns) {
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) {
        raw[p][k] = kExact ? load_pack(access.in[k] + offset.element + first) : access.load_raw(k, offset, first);
      }
    }
    if constexpr (A::kMasked) kept[p] = access.kept_of(offset, args.mask_stride, first, columns);
  }
  if constexpr (!kExact) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int first = (group.rank() + p * group.size()) * kWidth - shift;
      const unsigned bits = A::kMasked ? kept[A::kMasked ? p : 0] : A::inside_of(first, columns);
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) A::pad(raw[p][k], k, bits);
    }
  }

  constexpr bool kTerms = Op::kResultIsScaledTerm;
  C terms[kTerms ? kPacks : 1][kWidth];
  C pivot = M::constant(-M::kInfinity);
  if constexpr (Op::kHasPivot) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Values<A> values;
      widen_packs<A>(values, raw[p]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        pivot = M::max(pivot, Op::pivot(values[i]));
        if constexpr (kTerms) terms[p][i] = values[i][0];
      }
    }
    pivot = group.warp_max(pivot);
  }
  const C shield = shielded<M>(pivot);
  C sum = M::constant(0);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if constexpr (kTerms) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        terms[p][i] = Op::term(shield, &terms[p][i]);
        sum += terms[p][i];
      }
    } else {
      Values<A> values;
      widen_packs<A>(values, raw[p]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += Op::term(shield, values[i]);
    }
  }
  const State<C> state = group.combine_warps({pivot, group.warp_sum(sum)});
  if (!active) return;

  typename Op::Row finished;
  C scale;
  if constexpr (kTerms) {
    scale = Op::term_scale(state, pivot);
  } else {
    finished = Op::row(state);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = (group.rank() + p * group.size()) * kWidth - shift;
    if (!kExact && first >= columns) continue;
    C result[kWidth];
    if constexpr (kTerms) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result[i] = terms[p][i] * scale;
    } else {
      finish_pack<A>(result, finished, raw[p]);
    }
    access.template store_values<kExact>(result, offset, first, columns, kept[A::kMasked ? p : 0]);
  }
}

template <class A, int kLanes, int kPacks, bool kExact>
__global__ void __launch_bounds__(128) rows_in_lanes(const __grid_constant__ RowArgs<A> args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  row_in_registers<A, kPacks, kExact>(args, row, LaneGroup<typename A::Op, typename A::M, kLanes>());
}

template <class A, int kPacks, bool kExact>
__global__ void __launch_bounds__(256) rows_in_block(const __grid_constant__ RowArgs<A> args) {
  row_in_registers<A, kPacks, kExact>(args, blockIdx.x, BlockGroup<typename A::Op, typename A::M>());
}

// Steps through a row's packs in turns of kUnroll per thread: `load` is called for all packs of a turn before `use` is
// for any, so that their loads are in flight together.
template <class A, int kUnroll, class Load, class Use>
__device__ __forceinline__ void for_packs(int64_t packs, Load load, Use use) {
  for (int64_t turn = threadIdx.x; turn < packs; turn += static_cast<int64_t>(kUnroll) * blockDim.x) {
    Pack<typename A::T> raw[kUnroll][A::kInputs];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t j = turn + u * static_cast<int64_t>(blockDim.x);
      if (j < packs) load(raw[u], j);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t j = turn + u * static_cast<int64_t>(blockDim.x);
      if (j < packs) use(raw[u], j);
    }
  }
}

// A row held in the shared memory of a block, or (kHeld false) read twice. Each thread reads again only the packs that
// it wrote, 16 bytes next to its neighbour's: there are no bank conflicts, and no barrier but the reduction's.
template <class A, bool kHeld>
__global__ void __launch_bounds__(512) rows_in_turns(const __grid_constant__ RowArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth;
  constexpr int kUnroll = 4 / A::kInputs;
  extern __shared__ uint4 held[];
  const A& access = args.access;
  const RowOffset offset = args.offset(blockIdx.x);
  const int shift = access.shift_of(offset);
  const int64_t packs = (shift + args.columns + kWidth - 1) / kWidth;
  const auto read = [&](Pack<T>(&raw)[A::kInputs], int64_t j) {
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) raw[k] = access.load_raw(k, offset, j * kWidth - shift);
  };
  const auto kept_of = [&](int64_t j) {
    return access.kept_of(offset, args.mask_stride, j * kWidth - shift, args.columns);
  };
  const auto held_at = [&](int k, int64_t j) -> Pack<T>& { return reinterpret_cast<Pack<T>*>(held)[k * packs + j]; };

  State<C> state = identity<Op, M>();
  for_packs<A, kUnroll>(packs, read, [&](Pack<T>(&raw)[A::kInputs], int64_t j) {
    const unsigned kept = kept_of(j);
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) {
      A::pad(raw[k], k, kept);
      if constexpr (kHeld) held_at(k, j) = raw[k];
    }
    Values<A> values;
    widen_packs<A>(values, raw);
    accumulate<Op, M>(state, values);
  });
  const BlockGroup<Op, M> group;
  const auto row = Op::row(group.combine_warps(combine_over_lanes<Op, M, 32>(state)));
  const auto again = [&](Pack<T>(&raw)[A::kInputs], int64_t j) {
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) raw[k] = held_at(k, j);
    } else {
      read(raw, j);
    }
  };
  for_packs<A, kUnroll>(packs, again, [&](Pack<T>(&raw)[A::kInputs], int64_t j) {
    C result[kWidth];
    finish_pack<A>(result, row, raw);
    access.template store_values<false>(result, offset, j * kWidth - shift, args.columns,
                                        A::kMasked ? kept_of(j) : 0);
  });
}

}  // namespace jax_softmax::cuda
