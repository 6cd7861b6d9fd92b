// The schedule for short rows that do not begin at multiples of 16 bytes: neighbouring rows are one contiguous slab of
// memory, which a block reads and writes in whole packs through shared memory, whatever the rows' length.
#pragma once

#include "cuda/chunk.cuh"
#include "cuda/divisor.cuh"

namespace jax_softmax::cuda {

struct SlabArgs {
  int rows;           // of a slab
  Divisor inner;      // so many neighbouring rows are interleaved: the elements of a row are so far apart
  Divisor pad_every;  // packs after which shared memory has room for one more, so that rows begin in different banks
};

// kLanes lanes have a row, of up to kHeld elements each, neighbouring elements in neighbouring lanes.
template <class A, int kLanes, int kHeld, bool kInterleaved>
__global__ void __launch_bounds__(kSlabThreads)
    rows_in_slab(const __grid_constant__ RowArgs<A> args, const __grid_constant__ SlabArgs slab_args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth;
  extern __shared__ Pack held[];
  const A& access = args.access;
  const int slab_rows = slab_args.rows;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * slab_rows;
  const int rows = static_cast<int>(min(static_cast<int64_t>(slab_rows), args.rows - first_row));
  const int columns = static_cast<int>(args.columns);
  const int elements = rows * columns;
  const int packs = (elements + kWidth - 1) / kWidth;
  // Where a pack is held, with the room before it.
  const auto held_at = [&](int j) { return kInterleaved ? j + static_cast<int>(slab_args.pad_every.divide(j)) : j; };
  const int capacity = held_at(slab_rows * columns / kWidth);  // of a full slab, whose size is a multiple of 16 bytes
  const int apart = kInterleaved ? static_cast<int>(slab_args.inner.divisor) : 1;  // elements of a row
  const Offset slab{first_row * columns, 0};

  for (int j = threadIdx.x; j < packs; j += blockDim.x) {
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) {
      if (access.whole_in_memory(slab, j * kWidth)) {
        copy_pack(&held[k * capacity + held_at(j)], access.in[k] + slab.element + j * kWidth);
      } else {
        held[k * capacity + held_at(j)] = access.load_parts(k, slab, j * kWidth);
      }
    }
  }
  wait_for_copies();
  __syncthreads();

  const int lane = threadIdx.x % kLanes;
  for (int turn = 0; turn < rows; turn += blockDim.x / kLanes) {  // by whole warps, which reduce together
    const int row = min(turn + static_cast<int>(threadIdx.x) / kLanes, rows - 1);
    const bool active = turn + static_cast<int>(threadIdx.x) / kLanes < rows;
    const Offset offset = args.offset(first_row + row);
    int begin = row * columns;
    if (kInterleaved) {
      const int outer = slab_args.inner.divide(row);
      const int before = held_at(outer * apart * columns / kWidth) - outer * apart * columns / kWidth;
      begin = outer * apart * columns + before * kWidth + row - outer * apart;
    }
    T* const row_held = reinterpret_cast<T*>(held) + begin + lane * apart;
    const int mine = active ? columns - lane : 0;  // element i of this lane is the row's if i * kLanes < mine
    const auto at = [&](int i) { return Offset{0, offset.mask + (lane + i * kLanes) * args.mask_stride}; };
    C values[kHeld][A::kInputs];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) {
        values[i][k] = Op::pad(k);
        if (i * kLanes < mine) values[i][k] = Elements<T>::widen(row_held[k * capacity * kWidth + i * kLanes * apart]);
      }
      if (i * kLanes < mine) access.pad_if_masked(values[i], at(i));
    }
    C pivot = M::constant(0);
    if constexpr (Op::kHasPivot) {
      pivot = values[0][0];
#pragma unroll
      for (int i = 1; i < kHeld; ++i) pivot = M::max(pivot, values[i][0]);
      pivot = max_over_lanes<kLanes, M>(pivot);
    }
    const Relative<M> relative(pivot);
    C sum = M::constant(0);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const C term = Op::term(relative, values[i]);
      if (Op::kResultIsScaledTerm) values[i][0] = term;
      sum += term;
    }
    sum = sum_over_lanes<kLanes>(sum);
    const auto finished = Op::row(State<C>{pivot, sum});
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      C result;
      if constexpr (Op::kResultIsScaledTerm) {
        result = values[i][0] * finished.scale;
      } else {
        result = Op::finish(finished, values[i]);
      }
      if (i * kLanes < mine) row_held[i * kLanes * apart] = access.result(result, at(i));
    }
  }
  __syncthreads();

  for (int j = threadIdx.x; j < packs; j += blockDim.x) {
    T* const p = access.out + slab.element + j * kWidth;
    if ((j + 1) * kWidth <= elements) {
      store_pack(p, held[held_at(j)]);
    } else {
      store_elements(p, held[held_at(j)], A::bits_within(j * kWidth, elements));
    }
  }
}

}  // namespace jax_softmax::cuda
