// The schedule for short rows that do not begin at multiples of 16 bytes: neighbouring rows are one contiguous slab of
// memory, which a block reads and writes in whole packs through shared memory, whatever the rows' length.
#pragma once

#include "cuda/copies.cuh"
#include "cuda/rows.cuh"

namespace jax_softmax::cuda {

struct SlabArgs {
  int rows;           // of a slab
  int spread_shift;   // of pairs: rows that a warp has side by side lie 2^so many apart, in different banks
  Divisor inner;      // so many neighbouring rows are interleaved: the elements of a row are so far apart
  Divisor pad_every;  // packs after which shared memory has room for one more, so that rows begin in different banks
};

// How such a row lies in shared memory.
struct SlabRow {
  int begin;    // of its first element
  int columns;  // 0 for lanes that have no row
  int operand;  // elements from one operand to the next
};

// A row of 16-bit elements in the registers of kLanes lanes, in half as many turns as there are elements for each: a
// lane has whole words, neighbouring words in neighbouring lanes. A first and a last element that share theirs with
// another row are the first lane's.
template <class A, int kLanes, int kPairs>
__device__ __forceinline__ void row_of_pairs(typename A::T* held, const SlabRow& row, bool odd_columns) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kInputs = A::kInputs;
  const int lane = threadIdx.x % kLanes, shift = row.begin % 2;
  held += row.begin;
  uint32_t* const words = reinterpret_cast<uint32_t*>(held + shift) + lane;
  const int mine = (row.columns - shift) / 2 - lane;
  const bool first = lane == 0 && row.columns > 0 && shift != 0;
  const bool last = lane == 0 && row.columns > 0 && (row.columns - shift) % 2 != 0;
  uint32_t raw[kPairs + 1][kInputs];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    const uint32_t pads = Pair<T>::narrow(Op::pad(k), Op::pad(k));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      raw[i][k] = pads;
      if (i * kLanes < mine) raw[i][k] = words[k * (row.operand / 2) + i * kLanes];
    }
    raw[kPairs][k] = pads;
    if (odd_columns) {
      const T pad = Elements<T>::narrow(Op::pad(k));
      raw[kPairs][k] = Pair<T>::narrow(Elements<T>::widen(first ? held[k * row.operand] : pad),
                                       Elements<T>::widen(last ? held[k * row.operand + row.columns - 1] : pad));
    }
  }
  const auto widen = [&](C(&values)[2][kInputs], int i) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) Pair<T>::widen(values[0][k], values[1][k], raw[i][k]);
  };
  C pivot = M::constant(0);
  if constexpr (Op::kHasPivot) {
    uint32_t largest = raw[kPairs][0];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) largest = Pair<T>::max(largest, raw[i][0]);
    C low, high;
    Pair<T>::widen(low, high, largest);
    pivot = max_over_lanes<kLanes, M>(M::max(low, high));
  }
  const Relative<M> relative(pivot);
  C terms[Op::kResultIsScaledTerm ? kPairs + 1 : 1][2];
  C sum = M::constant(0);
  const auto add = [&](int i) {
    C values[2][kInputs];
    widen(values, i);
    const C low = Op::term(relative, values[0]), high = Op::term(relative, values[1]);
    if constexpr (Op::kResultIsScaledTerm) terms[i][0] = low, terms[i][1] = high;
    sum += low + high;
  };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) add(i);
  if (odd_columns) add(kPairs);
  const auto finished = Op::row(State<C>{pivot, sum_over_lanes<kLanes>(sum)});
  const auto result = [&](int i) {
    if constexpr (Op::kResultIsScaledTerm) {
      return Pair<T>::narrow(terms[i][0] * finished.scale, terms[i][1] * finished.scale);
    } else {
      C values[2][kInputs];
      widen(values, i);
      return Pair<T>::narrow(Op::finish(finished, values[0]), Op::finish(finished, values[1]));
    }
  };
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (i * kLanes < mine) words[i * kLanes] = result(i);
  }
  if (first || last) {
    const uint32_t edges = result(kPairs);
    auto* const half = reinterpret_cast<uint16_t*>(held);
    if (first) half[0] = static_cast<uint16_t>(edges);
    if (last) half[row.columns - 1] = static_cast<uint16_t>(edges >> 16);
  }
}

// Whether lanes have pairs of elements.
template <class A, int kLanes, bool kInterleaved>
inline constexpr bool kSlabOfPairs = sizeof(typename A::T) == 2 && !A::kMasked && !kInterleaved && kLanes >= 4;

// kLanes lanes have a row, of up to kHeld elements each, or one more of pairs.
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

  if constexpr (kSlabOfPairs<A, kLanes, kInterleaved>) {
    constexpr int kTeams = 32 / kLanes;
    const int spread = slab_args.spread_shift, team = threadIdx.x % 32 / kLanes;
    const int turns = (rows + (kTeams << spread) - 1) / (kTeams << spread) << spread;  // of warps
    for (int turn = threadIdx.x / 32; turn < turns; turn += blockDim.x / 32) {
      const int number = (((turn >> spread) * kTeams + team) << spread) | (turn & ((1 << spread) - 1));
      const SlabRow row{min(number, rows - 1) * columns, number < rows ? columns : 0, capacity * kWidth};
      row_of_pairs<A, kLanes, kHeld / 2>(reinterpret_cast<T*>(held), row, columns % 2 != 0);
    }
  } else {
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
          if (i * kLanes < mine)
            values[i][k] = Elements<T>::widen(row_held[k * capacity * kWidth + i * kLanes * apart]);
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
