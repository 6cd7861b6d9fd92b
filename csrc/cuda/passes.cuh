// Schedules for rows that are read twice: too long to hold, or on chips that cannot exchange what they hold.
#pragma once

#include "cuda/exchange.cuh"
#include "cuda/rows.cuh"

namespace jax_softmax::cuda {

// The packs [begin, end) of a row, counted from the one that the row begins in, as a block goes over them.
template <class A>
struct Stretch {
  using T = typename A::T;
  static constexpr int kWidth = A::kWidth;
  static constexpr int kUnroll = 4 / A::kInputs;

  const RowArgs<A>& args;
  const Offset offset;  // of the row
  const int shift;
  const int64_t begin;
  const int64_t end;

  __device__ __forceinline__ Stretch(const RowArgs<A>& args, int64_t row, int64_t begin, int64_t share)
      : args(args),
        offset(args.offset(row)),
        shift(args.access.shift_of(offset)),
        begin(begin),
        end(min(begin + share, (shift + args.columns + kWidth - 1) / kWidth)) {}

  // Calls use(packs, first, kept bits) for each of the thread's packs, the loads of kUnroll of them in flight together.
  template <class Use>
  __device__ __forceinline__ void for_packs(Use use) const {
    const A& access = args.access;
    for (int64_t turn = begin + threadIdx.x; turn < end; turn += static_cast<int64_t>(kUnroll) * blockDim.x) {
      Pack raw[kUnroll][A::kInputs];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t j = turn + u * static_cast<int64_t>(blockDim.x);
        if (j < end && access.whole_in_memory(offset, j * kWidth - shift)) {
#pragma unroll
          for (int k = 0; k < A::kInputs; ++k)
            raw[u][k] = load_pack(access.in[k] + offset.element + j * kWidth - shift);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t j = turn + u * static_cast<int64_t>(blockDim.x);
        const int64_t first = j * kWidth - shift;
        if (j >= end) break;
        const unsigned kept = access.kept_bits(offset, args.mask_stride, first, args.columns);
        if (kept != kAllBits<T>) {
#pragma unroll
          for (int k = 0; k < A::kInputs; ++k) {
            if (!access.whole_in_memory(offset, first)) raw[u][k] = access.load_parts(k, offset, first);
            raw[u][k] = select_elements<T>(kept, raw[u][k], A::pad_pack(k));
          }
        }
        use(raw[u], first, kept);
      }
    }
  }

  // The state of the stretch, known to all threads of the block.
  __device__ __forceinline__ State<typename A::C> state() const {
    using Op = typename A::Op;
    using M = typename A::M;
    State<typename A::C> state = identity<Op, M>();
    for_packs([&](const Pack(&raw)[A::kInputs], int64_t, unsigned) {
      typename A::Values values;
      A::widen(values, raw);
      accumulate<Op, M>(state, values);
    });
    return BlockGroup<Op, M>().combine_warps(combine_over_lanes<Op, M, 32>(state));
  }

  __device__ __forceinline__ void finish(const typename A::Op::Row& row) const {
    const A& access = args.access;
    for_packs([&](const Pack(&raw)[A::kInputs], int64_t first, unsigned kept) {
      if (first >= 0 && first + kWidth <= args.columns) {
        store_pack(access.out + offset.element + first, A::with_masked(A::finish(row, raw), kept));
      } else {
        access.store_parts(A::finish(row, raw), offset, first, args.columns, kept);
      }
    });
  }
};

template <class A>
struct PassArgs {
  RowArgs<A> rows;
  int64_t first_row;
  uint64_t* words;  // for each piece of each row
  int pieces;       // of a row
  int64_t share;    // 16-byte packs of each operand in a piece
};

// The first pass: the states of pieces of rows, a block to a piece.
template <class A>
__global__ void __launch_bounds__(kPassThreads) sum_pieces(const __grid_constant__ PassArgs<A> args) {
  using C = typename A::C;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = args.first_row + blockIdx.x / args.pieces;
  const int piece = blockIdx.x % args.pieces;
  const State<C> state = Stretch<A>(args.rows, row, piece * args.share, args.share).state();
  if (threadIdx.x == 0) {
    WordsInMemory<C>{args.words + row * args.pieces * kStateWords<C>}.publish(piece, state);
  }
}

// The second pass, beginning with what was read last and may still be in the last cache.
template <class A>
__global__ void __launch_bounds__(kPassThreads) finish_pieces(const __grid_constant__ PassArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t index = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x;
  const int64_t row = args.first_row + index / args.pieces;
  const int64_t piece = index % args.pieces;
  const WordsInMemory<C> words{args.words + row * args.pieces * kStateWords<C>};
  const State<C> state = await_row<Op, M>(words, args.pieces);
  Stretch<A>(args.rows, row, piece * args.share, args.share).finish(Op::row(state));
}

// A row read twice by a block, where there is no memory for an exchange.
template <class A>
__global__ void __launch_bounds__(kPassThreads) rows_read_twice(const __grid_constant__ RowArgs<A> args) {
  const Stretch<A> row(args, blockIdx.x, 0, args.columns);
  const auto finished = A::Op::row(row.state());
  row.finish(finished);
}

}  // namespace jax_softmax::cuda
