// Schedules for contiguous rows.
#pragma once

#include <type_traits>

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
  int boundary;         // that packs are counted from, where the kernel looks at the edges of rows

  __device__ __forceinline__ Offset offset(int64_t row) const {
    if constexpr (A::kMasked) {
      return {row * columns, offset_of(kept, kept.size, row).mask};
    } else {
      return {row * columns, 0};
    }
  }
};

// The same pointer, hidden from the compiler, which would rather compute it anew for each access than keep it.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  asm("" : "+l"(p));
  return p;
}

// Where the packs lie that a group of threads holds of a row: all of them, or a chunk [begin, begin + share).
template <class A, Edges kEdges>
struct Held {
  Offset offset;   // of the row
  int first;       // the row's element that this thread's first pack begins with
  int limit;       // packs that begin here or beyond belong to somebody else or to nobody
  int64_t origin;  // where the thread's first pack lies in the operand

  __device__ __forceinline__ Held(const RowArgs<A>& args, int64_t row, int rank, int begin, int share)
      : offset(args.offset(row)) {
    const int shift = kEdges == Edges::kParts ? args.access.shift_of(offset, args.boundary) : 0;
    first = (begin + rank) * A::kWidth - shift;
    limit = static_cast<int>(args.columns);
    if (share > 0) limit = min(limit, (begin + share) * A::kWidth - shift);
    origin = offset.element + first;
  }
};

// Packs in the registers of a group of threads: their maximum, the sum relative to the warp's maximum, one exchange,
// and the result. Packs are kept as they are in memory, or as their terms if the result is made of those.
template <class A, int kPacks, Edges kEdges, class Group>
__device__ __forceinline__ void finish_packs(const RowArgs<A>& args, const Held<A, kEdges>& held,
                                             Pack (&raw)[kPacks][A::kInputs], bool active, const Group& group) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth;
  const A& access = args.access;
  const int columns = static_cast<int>(args.columns);
  const auto first_of = [&](int p) { return held.first + p * group.size() * kWidth; };
  unsigned kept[A::kMasked ? kPacks : 1] = {};
  if constexpr (A::kMasked) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      kept[p] = first_of(p) < held.limit ? access.kept_bits(held.offset, args.mask_stride, first_of(p), columns) : 0;
    }
  }
  if constexpr (kEdges == Edges::kParts) {
    const auto memory = access.memory_range(held.offset, columns);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int first = first_of(p);
      if (!A::kMasked && first >= 0 && first + kWidth <= columns) continue;
      const unsigned bits = A::kMasked ? kept[A::kMasked ? p : 0] : A::bits_within(first, columns);
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) {
        if (bits && first < held.limit && !memory.holds(first)) raw[p][k] = access.load_parts(k, held.offset, first);
        raw[p][k] = select_elements<T>(bits, raw[p][k], A::pad_pack(k));
      }
    }
  }

  constexpr bool kTerms = Op::kResultIsScaledTerm;
  C terms[kTerms ? kPacks : 1][kWidth];
  C pivot = M::constant(0);
  if constexpr (Op::kHasPivot) {
    Pack largest = raw[0][0];
#pragma unroll
    for (int p = 1; p < kPacks; ++p) largest = Elements<T>::max(largest, raw[p][0]);
    pivot = group.warp_max(A::max_element(largest));
  }
  const Relative<M> relative(pivot);
  C sum = M::constant(0);
  // Blocks of rows that begin anywhere wait for arithmetic first: warps leave out packs that are all beyond the row.
  constexpr bool kMayEnd = kEdges == Edges::kParts && std::is_same_v<Group, BlockGroup<Op, M>>;
  const bool ends = kMayEnd && !__any_sync(kFullWarp, first_of(kPacks - 1) < held.limit);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (kMayEnd && p == kPacks - 1 && ends) break;
    if constexpr (kTerms) {
      C part = M::constant(0);
      Elements<T>::widen(terms[p], raw[p][0]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        terms[p][i] = Op::term(relative, &terms[p][i]);
        part += terms[p][i];
      }
      sum += part;
    } else {
      sum += A::sum_of_terms(relative, raw[p]);
    }
  }
  const State<C> state = group.combine_warps({pivot, group.warp_sum(sum)});
  if (!active) return;

  const typename Op::Row finished = Op::row(state);
  typename Op::Scale scale{};
  if constexpr (kTerms) scale = Op::term_scale(state, pivot);
  T* const out = opaque(access.out + held.origin);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = first_of(p);
    if (kEdges != Edges::kNone && first >= held.limit) continue;
    Pack result;
    if constexpr (kTerms) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) terms[p][i] = terms[p][i] * scale;
      result = Elements<T>::narrow(terms[p]);
    } else {
      result = A::finish(finished, raw[p]);
    }
    const unsigned bits = A::kMasked ? kept[A::kMasked ? p : 0] : ~0u;
    if (kEdges != Edges::kParts || (first >= 0 && first + kWidth <= columns)) {
      store_pack(out + p * group.size() * kWidth, A::with_masked(result, bits));
    } else {
      access.store_parts(result, held.offset, first, columns, bits);
    }
  }
}

// A row in the registers of a group of threads, all loads first.
template <class A, int kPacks, Edges kEdges, class Group>
__device__ __forceinline__ void row_in_registers(const RowArgs<A>& args, int64_t row, const Group& group) {
  const A& access = args.access;
  const bool active = row < args.rows;  // the last block's idle threads repeat the last row and store nothing
  const Held<A, kEdges> held(args, active ? row : args.rows - 1, group.rank(), 0, 0);
  const auto memory = access.memory_range(held.offset, static_cast<int>(args.columns));
  const typename A::T* in[A::kInputs];
#pragma unroll
  for (int k = 0; k < A::kInputs; ++k) in[k] = opaque(access.in[k] + held.origin);
  Pack raw[kPacks][A::kInputs];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = held.first + p * group.size() * A::kWidth;
    const bool reached = kEdges == Edges::kNone || first < held.limit;
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) {
      if (kEdges != Edges::kNone) raw[p][k] = A::pad_pack(k);
      if (reached && (kEdges != Edges::kParts || memory.holds(first))) {
        raw[p][k] = load_pack(in[k] + p * group.size() * A::kWidth);
      }
    }
  }
  finish_packs<A, kPacks, kEdges>(args, held, raw, active, group);
}

template <class A, int kLanes, int kPacks, Edges kEdges>
__global__ void __launch_bounds__(128) rows_in_lanes(const __grid_constant__ RowArgs<A> args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  row_in_registers<A, kPacks, kEdges>(args, row, LaneGroup<typename A::Op, typename A::M, kLanes>());
}

template <class A, int kPacks, Edges kEdges>
__global__ void __launch_bounds__(kPacks == 8 && sizeof(typename A::T) == 8 ? 512 : 256)
    rows_in_block(const __grid_constant__ RowArgs<A> args) {
  row_in_registers<A, kPacks, kEdges>(args, blockIdx.x, BlockGroup<typename A::Op, typename A::M>());
}

// Rows of so few columns that a pack holds several, or two packs do of which kInner neighbouring ones are interleaved.
template <class A, int kColumns, int kInner, int kPacks>
__global__ void __launch_bounds__(kPacksThreads) rows_in_packs(const __grid_constant__ RowArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth;
  constexpr int kTogether = kColumns * kInner > kWidth ? 2 : 1, kTurns = kPacks / kTogether;  // packs
  constexpr int kElements = kTogether * kWidth;
  const A& access = args.access;
  const Offset origin{0, 0};
  const int threads = blockDim.x;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kTurns * threads + threadIdx.x) * kElements;
  const auto begin_of = [&](int turn, int pack) { return first + turn * threads * kElements + pack * kWidth; };
  Pack raw[kTurns][kTogether][A::kInputs];
#pragma unroll
  for (int u = 0; u < kTurns; ++u) {
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      const int64_t begin = begin_of(u, p);
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) {
        raw[u][p][k] = access.whole_in_memory(origin, begin) ? load_pack(access.in[k] + begin)
                                                             : access.load_parts(k, origin, begin);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kTurns; ++u) {
    C values[kElements][A::kInputs];
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      typename A::Values of_pack;
      A::widen(of_pack, raw[u][p]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
#pragma unroll
        for (int k = 0; k < A::kInputs; ++k) values[p * kWidth + i][k] = of_pack[i][k];
      }
    }
    C result[kTogether][kWidth];
#pragma unroll
    for (int r = 0; r < kElements / kColumns; ++r) {
      const int begin = r / kInner * kInner * kColumns + r % kInner;
      C row[kColumns][A::kInputs];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
#pragma unroll
        for (int k = 0; k < A::kInputs; ++k) row[i][k] = values[begin + i * kInner][k];
      }
      if constexpr (kColumns == 1 && Op::kHasPivot) {
        result[0][begin] = Op::alone(row[0][0]);
      } else {
        State<C> state = identity<Op, M>();
        if constexpr (kTogether == 1) {
          state = state_of<Op, M>(row);
        } else {
          accumulate<Op, M>(state, row);  // fewer instructions than this, but slower code, of two packs
        }
        const auto finished = Op::row(state);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          const int at = begin + i * kInner;
          result[at / kWidth][at % kWidth] = Op::finish(finished, row[i]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      const int64_t begin = begin_of(u, p);
      const Pack pack = Elements<T>::narrow(result[p]);
      if (access.whole_in_memory(origin, begin)) {
        store_pack(access.out + begin, pack);
      } else {
        store_elements(access.out + begin, pack, A::bits_within(begin, access.elements));
      }
    }
  }
}

}  // namespace jax_softmax::cuda
