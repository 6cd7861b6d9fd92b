// Schedules for rows that are read twice: too long to hold, or on chips that cannot exchange what they hold.
#pragma once

#include "cuda/exchange.cuh"
#include "cuda/rows.cuh"

namespace jax_softmax::cuda {

// Packs of each operand that a thread finishes, if a block finishes part of a row.
inline constexpr int kFinishPacks = 2;

// The packs [begin, end) of a row, counted from the one that the row begins in, as a block goes over them.
template <class A>
struct Stretch {
  using T = typename A::T;
  static constexpr int kWidth = A::kWidth;
  static constexpr int kSumUnroll = 8 / (A::kInputs - A::Op::kFirstSummed);

  const RowArgs<A>& args;
  const Offset offset;  // of the row
  const int shift;
  const int64_t begin;
  const int64_t end;

  __device__ __forceinline__ Stretch(const RowArgs<A>& args, int64_t row, int64_t begin, int64_t share)
      : args(args),
        offset(args.offset(row)),
        shift(args.access.shift_of(offset, kPackBytes)),
        begin(begin),
        end(min(begin + share, (shift + args.columns + kWidth - 1) / kWidth)) {}

  // Calls use(packs, j, kept bits) for each of the thread's packs of the operands from kFirst on, the loads of kUnroll
  // of them in flight together; where `inner`, for packs alone that lie wholly inside the row, and all together:
  // use(packs, j of the first of them, end).
  template <bool inner, int kFirst, int kUnroll, class Use>
  __device__ __forceinline__ void for_packs(int64_t from, int64_t to, Use use) const {
    const A& access = args.access;
    for (int64_t turn = from + threadIdx.x; turn < to; turn += static_cast<int64_t>(kUnroll) * kPassThreads) {
      Pack raw[kUnroll][A::kInputs];
      const int64_t origin = offset.element + turn * kWidth - shift;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t j = turn + u * kPassThreads;
#pragma unroll
        for (int k = 0; k < A::kInputs; ++k) {
          raw[u][k] = A::pad_pack(k);
          if (k >= kFirst && j < to && (inner || access.whole_in_memory(offset, j * kWidth - shift))) {
            raw[u][k] = load_pack(access.in[k] + origin + u * kPassThreads * kWidth);
          }
        }
      }
      if constexpr (inner) {
        use(raw, turn, to);
      } else {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t j = turn + u * kPassThreads;
          const int64_t first = j * kWidth - shift;
          if (j >= to) break;
          const unsigned kept = access.kept_bits(offset, args.mask_stride, first, args.columns);
          if (kept != kAllBits<T>) {
#pragma unroll
            for (int k = kFirst; k < A::kInputs; ++k) {
              if (!access.whole_in_memory(offset, first)) raw[u][k] = access.load_parts(k, offset, first);
              raw[u][k] = select_elements<T>(kept, raw[u][k], A::pad_pack(k));
            }
          }
          use(raw[u], j, kept);
        }
      }
    }
  }

  // The packs [whole_begin, whole_end) lie wholly inside the row and are not masked.
  __device__ __forceinline__ int64_t whole_begin() const {
    return A::kMasked ? begin : max(begin, static_cast<int64_t>(shift > 0));
  }
  __device__ __forceinline__ int64_t whole_end() const {
    return A::kMasked ? begin : max(whole_begin(), min(end, (shift + args.columns) / kWidth));
  }

  // The state of the stretch, known to all threads of the block.
  __device__ __forceinline__ State<typename A::C> state() const {
    using Op = typename A::Op;
    using M = typename A::M;
    using C = typename A::C;
    constexpr int kFirst = Op::kFirstSummed;
    State<C> state = identity<Op, M>();
    const auto many = [&](const Pack(&raw)[kSumUnroll][A::kInputs], int64_t, int64_t) {
      if constexpr (Op::kHasPivot) {
        Pack largest = raw[0][0];
#pragma unroll
        for (int u = 1; u < kSumUnroll; ++u) largest = Elements<T>::max(largest, raw[u][0]);
        const C pivot = M::max(state.pivot, A::max_element(largest));
        state.sum *= Relative<M>(pivot).rescale(state.pivot);
        state.pivot = pivot;
      }
      const Relative<M> relative(state.pivot);
#pragma unroll
      for (int u = 0; u < kSumUnroll; ++u) state.sum += A::sum_of_terms(relative, raw[u]);
    };
    const auto one = [&](const Pack(&raw)[A::kInputs], int64_t, unsigned) {
      typename A::Values values;
      A::widen(values, raw);
      accumulate<Op, M>(state, values);
    };
    for_packs<true, kFirst, kSumUnroll>(whole_begin(), whole_end(), many);
    for_packs<false, kFirst, kSumUnroll>(begin, min(end, whole_begin()), one);
    for_packs<false, kFirst, kSumUnroll>(whole_end(), end, one);
    return BlockGroup<Op, M>().combine_warps(combine_over_lanes<Op, M, 32>(state));
  }

  template <int kUnroll>
  __device__ __forceinline__ void finish(const typename A::Op::Row& row) const {
    const A& access = args.access;
    const auto many = [&](const Pack(&raw)[kUnroll][A::kInputs], int64_t j, int64_t to) {
      T* const out = access.out + offset.element + j * kWidth - shift;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (j + u * kPassThreads < to) store_pack(out + u * kPassThreads * kWidth, A::finish(row, raw[u]));
      }
    };
    const auto one = [&](const Pack(&raw)[A::kInputs], int64_t j, unsigned kept) {
      const int64_t first = j * kWidth - shift;
      if (first >= 0 && first + kWidth <= args.columns) {
        store_pack(access.out + offset.element + first, A::with_masked(A::finish(row, raw), kept));
      } else {
        access.store_parts(A::finish(row, raw), offset, first, args.columns, kept);
      }
    };
    for_packs<true, 0, kUnroll>(whole_begin(), whole_end(), many);
    for_packs<false, 0, kUnroll>(begin, min(end, whole_begin()), one);
    for_packs<false, 0, kUnroll>(whole_end(), end, one);
  }
};

// A launch sums the pieces of rows, another puts their states together, and the last one finishes them.
template <class A>
struct PassArgs {
  RowArgs<A> rows;
  State<typename A::C>* states;  // by row and piece
  int pieces;                    // of a row
  int64_t share;                 // 16-byte packs of each operand in a piece
  Divisor parts;                 // of a row that is finished, a block each
};

template <class A>
__global__ void __launch_bounds__(kPassThreads, sizeof(typename A::C) == 8 ? 1 : 3)
    sum_pieces(const __grid_constant__ PassArgs<A> args) {
  const int64_t row = blockIdx.x / args.pieces;
  const int piece = static_cast<int>(blockIdx.x - row * args.pieces);
  const auto state = Stretch<A>(args.rows, row, piece * args.share, args.share).state();
  let_next_kernel_start();
  if (threadIdx.x == 0) args.states[blockIdx.x] = state;
}

// The states of a row's pieces become one, in the place of the first: a warp to a row.
template <class Op, class M>
__global__ void __launch_bounds__(kPassThreads)
    combine_pieces(State<typename M::Value>* states, int pieces, int columns, int64_t rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kPassThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  State<typename M::Value>* const of_row = states + row / columns * pieces * columns + row % columns;
  const auto state = combine_over_lanes<Op, M, 32>(combine_entries<Op, M>(
      threadIdx.x % 32, pieces, 32, [&](int piece) { return of_row[static_cast<int64_t>(piece) * columns]; }));
  if (threadIdx.x % 32 == 0) *of_row = state;
}

// What was read last, and may still be in the last cache, is finished first. Each block has little to do: memory is
// faster the nearer to one another are the places that it is asked for.
template <class A>
__global__ void __launch_bounds__(kPassThreads) finish_parts(const __grid_constant__ PassArgs<A> args) {
  wait_for_previous_kernel();
  const unsigned index = gridDim.x - 1 - blockIdx.x, row = args.parts.divide(index);
  constexpr int64_t kPacks = kFinishPacks * kPassThreads;
  const Stretch<A> part(args.rows, row, (index - row * args.parts.divisor) * kPacks, kPacks);
  part.template finish<kFinishPacks>(A::Op::row(args.states[static_cast<int64_t>(row) * args.pieces]));
}

// A row read twice by a block, where there is no memory for an exchange.
template <class A>
__global__ void __launch_bounds__(kPassThreads) rows_read_twice(const __grid_constant__ RowArgs<A> args) {
  const Stretch<A> row(args, blockIdx.x, 0, args.columns);
  const auto finished = A::Op::row(row.state());
  row.template finish<8 / A::kInputs>(finished);
}

}  // namespace jax_softmax::cuda
