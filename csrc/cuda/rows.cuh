// Schedules for contiguous rows.
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

// A row in the registers of a group of threads, packed as it is in memory, or as its terms if the result is made of
// those: all loads first, then the maximum, then the sum relative to the warp's maximum, then one exchange.
template <class A, int kPacks, Edges kEdges, class Group>
__device__ __forceinline__ void row_in_registers(const RowArgs<A>& args, int64_t row, const Group& group) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth;
  const A& access = args.access;
  const bool active = row < args.rows;  // the last block's idle threads repeat the last row and store nothing
  const Offset offset = args.offset(active ? row : args.rows - 1);
  const int columns = static_cast<int>(args.columns);
  const int shift = kEdges == Edges::kParts ? access.shift_of(offset) : 0;
  const auto first_of = [&](int p) { return (group.rank() + p * group.size()) * kWidth - shift; };
  const auto memory = access.memory_range(offset, columns);
  const int64_t origin = offset.element - shift + group.rank() * kWidth;
  const T* in[A::kInputs];
#pragma unroll
  for (int k = 0; k < A::kInputs; ++k) in[k] = opaque(access.in[k] + origin);

  Pack raw[kPacks][A::kInputs];
  unsigned kept[A::kMasked ? kPacks : 1] = {};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = first_of(p);
    const bool reached = kEdges == Edges::kNone || first < columns;
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) {
      if (kEdges != Edges::kNone) raw[p][k] = A::pad_pack(k);
      if (reached && (kEdges != Edges::kParts || memory.holds(first))) {
        raw[p][k] = load_pack(in[k] + p * group.size() * kWidth);
      }
    }
    if constexpr (A::kMasked) kept[p] = access.kept_bits(offset, args.mask_stride, first, columns);
  }
  if constexpr (kEdges == Edges::kParts) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int first = first_of(p);
      if (!A::kMasked && first >= 0 && first + kWidth <= columns) continue;
      const unsigned bits = A::kMasked ? kept[A::kMasked ? p : 0] : A::bits_within(first, columns);
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) {
        if (first < columns && !memory.holds(first)) raw[p][k] = access.load_parts(k, offset, first);
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
  const C shield = shielded<M>(pivot);
  C sum = M::constant(0);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if constexpr (kTerms) {
      C part = M::constant(0);
      Elements<T>::widen(terms[p], raw[p][0]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        terms[p][i] = Op::term(shield, &terms[p][i]);
        part += terms[p][i];
      }
      sum += part;
    } else {
      sum += A::sum_of_terms(shield, raw[p]);
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
  T* const out = opaque(access.out + origin);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int first = first_of(p);
    if (kEdges != Edges::kNone && first >= columns) continue;
    Pack result;
    if constexpr (kTerms) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) terms[p][i] *= scale;
      result = Elements<T>::narrow(terms[p]);
    } else {
      result = A::finish(finished, raw[p]);
    }
    const unsigned bits = A::kMasked ? kept[A::kMasked ? p : 0] : ~0u;
    if (kEdges != Edges::kParts || (first >= 0 && first + kWidth <= columns)) {
      store_pack(out + p * group.size() * kWidth, A::with_masked(result, bits));
    } else {
      access.store_parts(result, offset, first, columns, bits);
    }
  }
}

template <class A, int kLanes, int kPacks, Edges kEdges>
__global__ void __launch_bounds__(128) rows_in_lanes(const __grid_constant__ RowArgs<A> args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  row_in_registers<A, kPacks, kEdges>(args, row, LaneGroup<typename A::Op, typename A::M, kLanes>());
}

template <class A, int kPacks, Edges kEdges>
__global__ void __launch_bounds__(256) rows_in_block(const __grid_constant__ RowArgs<A> args) {
  row_in_registers<A, kPacks, kEdges>(args, blockIdx.x, BlockGroup<typename A::Op, typename A::M>());
}

// Copies 16 bytes to shared memory without passing through registers, where the chip can. Completed by
// wait_for_copies.
__device__ __forceinline__ void copy_pack(Pack* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *shared = load_pack(global);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// A row held in the shared memory of a cluster of blocks, each of which has an equal share of it. Each thread reads
// again only the packs that it copied, 16 bytes next to its neighbour's: there are no bank conflicts, and no barrier
// but the cluster's one. kPacks is the most packs that a thread has, 0 if only the run knows.
template <class A, int kPacks, Edges kEdges>
__global__ void __launch_bounds__(256) rows_in_cluster(const __grid_constant__ RowArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth;
  extern __shared__ Pack held[];
  const ClusterGroup<Op, M> group;
  const A& access = args.access;
  const Offset offset = args.offset(blockIdx.x / group.blocks());
  const int columns = static_cast<int>(args.columns);
  const int shift = kEdges == Edges::kParts ? access.shift_of(offset) : 0;
  const int row_packs = (shift + columns + kWidth - 1) / kWidth;
  const int share = (row_packs + group.blocks() - 1) / group.blocks();
  const int begin = group.block() * share;
  const int packs = min(share, row_packs - begin);  // of this block; none is left for it if not positive
  const auto memory = access.memory_range(offset, columns);
  const auto first_of = [&](int j) { return (begin + j) * kWidth - shift; };
  const auto at = [&](int k, int j) -> Pack& { return held[k * share + j]; };
  // The packs [whole_begin, whole_end) lie wholly inside the row.
  const int whole_begin = kEdges == Edges::kParts && first_of(0) < 0 ? 1 : 0;
  const int whole_end = kEdges == Edges::kParts && first_of(packs) > columns ? packs - 1 : packs;
  const int64_t origin = offset.element + first_of(threadIdx.x);
  // Calls body(p) for the thread's packs [from, to), pack p being pack threadIdx.x + p * 256 of the block.
  const auto for_packs = [&](int from, int to, auto body) {
    const int before = to - threadIdx.x;
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if ((p > 0 || static_cast<int>(threadIdx.x) >= from) && p * 256 < before) body(p);
      }
    } else {
#pragma unroll 4
      for (int p = 0; p * 256 < before; ++p) {
        if (p > 0 || static_cast<int>(threadIdx.x) >= from) body(p);
      }
    }
  };
  const auto packs_at = [&](Pack(&raw)[A::kInputs], int p) {
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) raw[k] = at(k, threadIdx.x + p * 256);
  };
  // Calls body(j) for packs that lie partly outside of the row: its first and its last one at most. Out of the way of
  // the unrolled loops, which their rarely taken branches would fill.
  const auto for_edges = [&](auto body) {
    if (whole_begin > 0 && threadIdx.x == 0) body(0);
    if (whole_end < packs && whole_end >= whole_begin && whole_end % 256 == static_cast<int>(threadIdx.x)) {
      body(whole_end);
    }
  };

  const T* in[A::kInputs];
#pragma unroll
  for (int k = 0; k < A::kInputs; ++k) in[k] = opaque(access.in[k] + origin);
  for_packs(whole_begin, whole_end, [&](int p) {
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) copy_pack(&at(k, threadIdx.x + p * 256), in[k] + p * 256 * kWidth);
  });
  if constexpr (kEdges == Edges::kParts) {
    for_edges([&](int j) {
      const int first = first_of(j);
      const unsigned bits = A::bits_within(first, columns);
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) {
        const Pack pack = memory.holds(first) ? load_pack(access.in[k] + offset.element + first)
                                              : access.load_parts(k, offset, first);
        at(k, j) = select_elements<T>(bits, pack, A::pad_pack(k));
      }
    });
  }
  wait_for_copies();
  if constexpr (A::kMasked) {
    for_packs(0, packs, [&](int p) {
      const int j = threadIdx.x + p * 256;
      const unsigned bits = access.kept_bits(offset, args.mask_stride, first_of(j), columns);
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) at(k, j) = select_elements<T>(bits, at(k, j), A::pad_pack(k));
    });
  }

  C pivot = M::constant(0);
  if constexpr (Op::kHasPivot) {
    Pack largest = A::pad_pack(0);
    for_packs(0, packs, [&](int p) { largest = Elements<T>::max(largest, at(0, threadIdx.x + p * 256)); });
    pivot = group.warp_max(A::max_element(largest));
  }
  const C shield = shielded<M>(pivot);
  C sum = M::constant(0);
  for_packs(0, packs, [&](int p) {
    Pack raw[A::kInputs];
    packs_at(raw, p);
    sum += A::sum_of_terms(shield, raw);
  });
  const auto row = Op::row(group.combine_warps({pivot, group.warp_sum(sum)}));
  T* const out = opaque(access.out + origin);
  for_packs(whole_begin, whole_end, [&](int p) {
    Pack raw[A::kInputs];
    packs_at(raw, p);
    Pack result = A::finish(row, raw);
    if constexpr (A::kMasked) {
      const int first = first_of(threadIdx.x + p * 256);
      result = A::with_masked(result, access.kept_bits(offset, args.mask_stride, first, columns));
    }
    store_pack(out + p * 256 * kWidth, result);
  });
  if constexpr (kEdges == Edges::kParts) {
    for_edges([&](int j) {
      const int first = first_of(j);
      Pack raw[A::kInputs];
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) raw[k] = at(k, j);
      const unsigned kept = access.kept_bits(offset, args.mask_stride, first, columns);
      access.store_parts(A::finish(row, raw), offset, first, columns, kept);
    });
  }
}

// A row read twice by a block.
template <class A>
__global__ void __launch_bounds__(512) rows_read_twice(const __grid_constant__ RowArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  constexpr int kWidth = A::kWidth;
  constexpr int kUnroll = 4 / A::kInputs;
  const A& access = args.access;
  const Offset offset = args.offset(blockIdx.x);
  const int shift = access.shift_of(offset);
  const int64_t packs = (shift + args.columns + kWidth - 1) / kWidth;
  // Calls use(packs, first, kept bits) for each of the thread's packs, the loads of kUnroll of them in flight together.
  const auto for_packs = [&](auto use) {
    for (int64_t turn = threadIdx.x; turn < packs; turn += static_cast<int64_t>(kUnroll) * blockDim.x) {
      Pack raw[kUnroll][A::kInputs];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t j = turn + u * static_cast<int64_t>(blockDim.x);
        if (j < packs && access.whole_in_memory(offset, j * kWidth - shift)) {
#pragma unroll
          for (int k = 0; k < A::kInputs; ++k)
            raw[u][k] = load_pack(access.in[k] + offset.element + j * kWidth - shift);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t j = turn + u * static_cast<int64_t>(blockDim.x);
        const int64_t first = j * kWidth - shift;
        if (j >= packs) break;
        const unsigned kept = access.kept_bits(offset, args.mask_stride, first, args.columns);
        if (kept != kAllBits<typename A::T>) {
#pragma unroll
          for (int k = 0; k < A::kInputs; ++k) {
            if (!access.whole_in_memory(offset, first)) raw[u][k] = access.load_parts(k, offset, first);
            raw[u][k] = select_elements<typename A::T>(kept, raw[u][k], A::pad_pack(k));
          }
        }
        use(raw[u], first, kept);
      }
    }
  };

  State<C> state = identity<Op, M>();
  for_packs([&](const Pack(&raw)[A::kInputs], int64_t, unsigned) {
    typename A::Values values;
    A::widen(values, raw);
    accumulate<Op, M>(state, values);
  });
  const BlockGroup<Op, M> group;
  const auto row = Op::row(group.combine_warps(combine_over_lanes<Op, M, 32>(state)));
  for_packs([&](const Pack(&raw)[A::kInputs], int64_t first, unsigned kept) {
    if (first >= 0 && first + kWidth <= args.columns) {
      store_pack(access.out + offset.element + first, A::with_masked(A::finish(row, raw), kept));
    } else {
      access.store_parts(A::finish(row, raw), offset, first, args.columns, kept);
    }
  });
}

}  // namespace jax_softmax::cuda
