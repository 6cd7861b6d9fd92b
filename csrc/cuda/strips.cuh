// The schedule for few lines that begin anywhere in a pack: a block has a strip of neighbouring columns of all of them
// in shared memory, into which it reads whole packs and out of which it writes them; a thread holds whole columns.
#pragma once

#include "cuda/chunk.cuh"

namespace jax_softmax::cuda {

template <class A>
struct StripArgs {
  A access;
  Tile tile;
  Strided kept, lines;
  Divisor packs, segment_tiles;
};

// Up to kLines lines.
template <class A, int kLines, int kTogether = strip_columns(kLines, A::kInputs)>
__global__ void __launch_bounds__(kStripThreads) rows_in_strips(const __grid_constant__ StripArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth, kInputs = A::kInputs, kBytes = sizeof(T);
  constexpr int kBatch = kLines < 16 ? kLines / 4 : 4;
  extern __shared__ __align__(128) Pack held[];
  // For each line, in bytes: where pack 0 would be if all of the strip's packs followed one another as this line's do,
  // where the line's part of the strip begins in `held`, and in the mask.
  __shared__ int64_t pack_at[kLines];
  __shared__ __align__(16) int held_at[kLines];
  __shared__ int64_t mask_at[A::kMasked ? kLines : 1];
  const A& access = args.access;
  const Tile& tile = args.tile;
  const int lines = tile.all_lines, packs = lines * tile.packs;

  const int number = args.segment_tiles.divide(blockIdx.x);
  const int64_t first_column = static_cast<int64_t>(blockIdx.x - number * tile.segment_tiles) * tile.width;
  const int columns = static_cast<int>(min(static_cast<int64_t>(tile.width), tile.segment - first_column));
  if (threadIdx.x < kLines) {
    const int line = min(static_cast<int>(threadIdx.x), lines - 1);
    unsigned ignored;
    const Offset begin = args.kept.at(number, &ignored) + args.lines.at(line, &ignored) +
                         Offset{first_column, first_column * tile.outer_mask};
    const int shift = static_cast<int>(begin.element) & (kWidth - 1), before = line * tile.packs * kWidth;
    pack_at[threadIdx.x] = (begin.element - shift - before) * kBytes;
    held_at[threadIdx.x] = (before + shift) * kBytes;
    if constexpr (A::kMasked) mask_at[threadIdx.x] = begin.mask;
  }
  __syncthreads();
  const int64_t last = access.elements * kBytes - kPackBytes;
#pragma unroll 4
  for (int u = threadIdx.x; u < packs; u += blockDim.x) {
    const int64_t begin = pack_at[args.packs.divide(u)] + u * kPackBytes;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (begin <= last) {
        copy_pack(&held[k * packs + u], reinterpret_cast<const char*>(access.in[k]) + begin);
      } else {
        held[k * packs + u] = access.load_parts(k, {begin / kBytes, 0}, 0);
      }
    }
  }
  wait_for_copies();
  __syncthreads();

  for (int column = threadIdx.x; column < columns; column += kTogether * blockDim.x) {
    bool there[kTogether];
    char* element[kTogether];
    int64_t mask[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      there[j] = column + j * static_cast<int>(blockDim.x) < columns;
      const int mine = there[j] ? column + j * static_cast<int>(blockDim.x) : column;
      element[j] = reinterpret_cast<char*>(held) + mine * kBytes;
      mask[j] = mine * tile.outer_mask;
    }
    C values[kTogether][kLines][kInputs];
    // Calls use(u) for all lines; some at a time are there or not.
    const auto for_lines = [&](auto use) {
#pragma unroll
      for (int b = 0; b < kLines; b += kBatch) {
        if (b + kBatch <= lines) {
#pragma unroll
          for (int u = b; u < b + kBatch; ++u) use(u);
        } else {
#pragma unroll
          for (int u = b; u < b + kBatch; ++u) {
            if (u < lines) use(u);
          }
        }
      }
    };
    C pivot[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) pivot[j] = M::constant(Op::kHasPivot ? -M::kInfinity : 0);
    for_lines([&](int u) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const char* const from = element[j] + held_at[u];
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
          values[j][u][k] = Elements<T>::widen(*reinterpret_cast<const T*>(from + k * packs * kPackBytes));
        }
        if constexpr (A::kMasked) access.pad_if_masked(values[j][u], {0, mask_at[u] + mask[j]});
        if constexpr (Op::kHasPivot) pivot[j] = M::max(pivot[j], values[j][u][0]);
      }
    });
    Relative<M> relative[kTogether];
    C sum[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      relative[j] = Relative<M>(pivot[j]);
      sum[j] = M::constant(0);
    }
    for_lines([&](int u) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const C term = Op::term(relative[j], values[j][u]);
        if constexpr (Op::kResultIsScaledTerm) values[j][u][0] = term;
        sum[j] += term;
      }
    });
    typename Op::Row row[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) row[j] = Op::row({pivot[j], sum[j]});
    for_lines([&](int u) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        C result;
        if constexpr (Op::kResultIsScaledTerm) {
          result = values[j][u][0] * row[j].scale;
        } else {
          result = Op::finish(row[j], values[j][u]);
        }
        if (j == 0 || there[j]) {
          *reinterpret_cast<T*>(element[j] + held_at[u]) =
              access.result(result, {0, A::kMasked ? mask_at[u] + mask[j] : 0});
        }
      }
    });
  }
  __syncthreads();

#pragma unroll 4
  for (int u = threadIdx.x; u < packs; u += blockDim.x) {
    const int line = args.packs.divide(u);
    const int first = (u * kPackBytes - held_at[line]) / kBytes;  // of the strip's columns
    T* const to = reinterpret_cast<T*>(reinterpret_cast<char*>(access.out) + pack_at[line] + u * kPackBytes);
    if (first >= 0 && first + kWidth <= columns) {
      store_pack(to, held[u]);
    } else {
      store_elements(to, held[u], A::bits_within(first, columns));
    }
  }
}

}  // namespace jax_softmax::cuda
