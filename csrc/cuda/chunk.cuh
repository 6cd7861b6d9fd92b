// Rows that are cut into chunks of up to 16 or 18 KB of all operands together, which teams of threads hold in shared
// memory. A row's chunks, and so its bits, are the same however many of them a block has and however blocks exchange
// their states.
#pragma once

#include "cuda/copies.cuh"
#include "cuda/exchange.cuh"
#include "cuda/rows.cuh"

namespace jax_softmax::cuda {

template <class A>
struct ChunkArgs {
  RowArgs<A> rows;
  uint64_t* words;  // for each chunk of each row, and the ticket counter behind them; null where there is no need
  int chunks;       // of a row
  int share;        // 16-byte packs of each operand in a chunk
  int stages;       // of a ring
  int spare;        // packs more than that of each operand in a stage: where rows do not begin with a whole line of the
                    // last cache, but with a whole pack, so that a copy may begin and end with whole lines
  int again;        // chunks of a row that a ring reads twice
  Divisor items;    // of a row, those twice
};

// A chunk as one thread of its team sees it, which has the packs rank + p * kThreads.
template <class A, Edges kEdges>
struct Chunk {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  static constexpr int kWidth = A::kWidth;
  static constexpr bool kHasParts = kEdges == Edges::kParts || kEdges == Edges::kPartsOfMany;
  static constexpr int kPacks = chunk_packs(A::kInputs, kEdges);
  static constexpr int kThreads = chunk_threads(A::kInputs, kEdges);
  static constexpr int kWarps = kThreads / 32;
  // Terms are kept in the place of elements where there is room for them, to be taken once.
  static constexpr bool kKeepsTerms = Op::kResultIsScaledTerm && sizeof(T) == sizeof(C);

  const RowArgs<A>& args;
  const int room;  // packs of each operand
  Pack* shared;
  const int rank;
  const Offset row;
  int first;  // the row's element that the chunk begins with, negative where its first pack begins before the row
  int packs;  // none is left for this chunk if not positive
  // Of the line of the last cache that the chunk begins in, packs before it, in memory and in `shared`: if there is
  // room for whole lines.
  int before = 0;

  __device__ __forceinline__ Chunk(const ChunkArgs<A>& chunks, int64_t index, int chunk, Pack* shared)
      : args(chunks.rows),
        room(chunks.share + chunks.spare),
        shared(shared),
        rank(threadIdx.x % kThreads),
        row(chunks.rows.offset(index)) {
    const int shift = kHasParts ? args.access.shift_of(row, args.boundary) : 0;
    const int row_packs = (shift + columns() + kWidth - 1) / kWidth;
    first = chunk * chunks.share * kWidth - shift;
    packs = chunk < chunks.chunks ? min(chunks.share, row_packs - chunk * chunks.share) : 0;
    if (kEdges == Edges::kWhole && chunks.spare > 0) {
      before = static_cast<unsigned>(row.element + first) / kWidth % kLinePacks;
      this->shared += before;
    }
  }
  __device__ __forceinline__ int columns() const { return static_cast<int>(args.columns); }
  __device__ __forceinline__ int first_of(int p) const { return first + (rank + p * kThreads) * kWidth; }
  __device__ __forceinline__ Pack* at(int k, int j) const { return shared + k * room + j; }
  // The packs [whole_begin, whole_end) lie wholly inside the row; its first and last one may not, and some more lie
  // before it where they are counted from the start of a line.
  __device__ __forceinline__ int whole_begin() const {
    return kHasParts && first < 0 ? (-first + kWidth - 1) / kWidth : 0;
  }
  __device__ __forceinline__ int whole_end() const {
    return kHasParts && first + packs * kWidth > columns() ? packs - 1 : packs;
  }
  // Calls body(j) for packs that lie partly or wholly outside of the row, in the thread that has them: out of the way
  // of the unrolled loops, which their rarely taken branches would fill.
  template <class Body>
  __device__ __forceinline__ void for_edges(Body body) const {
    if constexpr (kHasParts) {
      if (rank < whole_begin()) body(rank);
      const int last = packs - 1;
      if (whole_end() == last && last >= whole_begin() && last % kThreads == rank) body(last);
    }
  }

  // The packs [copy_begin, copy_end) can be read whole; others may reach beyond the operand.
  __device__ __forceinline__ int copy_begin() const {
    const int64_t begin = row.element + first;
    return kHasParts && begin < 0 ? (static_cast<int>(-begin) + kWidth - 1) / kWidth : 0;
  }
  __device__ __forceinline__ int copy_end() const {
    return kHasParts && row.element + first + static_cast<int64_t>(packs) * kWidth > args.access.elements ? packs - 1
                                                                                                          : packs;
  }
  // Those and what is around them: whole lines of the last cache, if there is room for them.
  struct Range {
    int begin, end;
  };
  __device__ __forceinline__ Range copied_lines(const ChunkArgs<A>& chunks) const {
    if (kEdges != Edges::kWhole || chunks.spare == 0) return {copy_begin(), copy_end()};
    const int64_t left = args.access.elements - row.element - first;
    const int end = (before + packs + kLinePacks - 1) / kLinePacks * kLinePacks - before;
    return {-before, end * kWidth <= left ? end : static_cast<int>(left / kWidth)};
  }
  // Copies those that cannot, where `mine` says that it is for this thread to do.
  template <class Mine>
  __device__ __forceinline__ void copy_beyond(Mine mine) const {
    if constexpr (kHasParts) {
      const auto copy = [&](int j) {
        if (!mine(j)) return;
#pragma unroll
        for (int k = 0; k < A::kInputs; ++k) *at(k, j) = args.access.load_parts(k, row, first + j * kWidth);
      };
      for (int j = 0; j < copy_begin(); ++j) copy(j);
      if (copy_end() < packs && copy_end() >= copy_begin()) copy(copy_end());
    }
  }

  // The state of the warp's packs.
  __device__ __forceinline__ State<C> warp_state() const {
    if constexpr (A::kMasked) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int j = rank + p * kThreads;
        if (j < packs) mend(j, args.access.kept_bits(row, args.mask_stride, first + j * kWidth, columns()));
      }
    } else {
      for_edges([&](int j) { mend(j, A::bits_within(first + j * kWidth, columns())); });
    }
    if constexpr (!Op::kHasPivot) {
      const Relative<M> relative(M::constant(0));
      C sum = M::constant(0);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int j = rank + p * kThreads;
        if (j >= packs) continue;
        Pack raw[A::kInputs];
#pragma unroll
        for (int k = 0; k < A::kInputs; ++k) raw[k] = *at(k, j);
        sum += A::sum_of_terms(relative, raw);
      }
      return {M::constant(0), sum_over_lanes<32>(sum)};
    } else {
      constexpr bool kHold = sizeof(C) == 4;  // in registers, of which float64's exponential needs many
      Pack raw[kHold ? kPacks : 1];
      const auto pack_of = [&](int p) {
        const int j = rank + p * kThreads;
        Pack pack = A::pad_pack(0);
        if (j < packs) pack = *at(0, j);
        return pack;
      };
      Pack largest = A::pad_pack(0);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Pack pack = pack_of(p);
        if constexpr (kHold) raw[p] = pack;
        largest = Elements<T>::max(largest, pack);
      }
      const C pivot = max_over_lanes<32, M>(A::max_element(largest));
      const Relative<M> relative(pivot);
      C sum = M::constant(0);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (p * kThreads >= packs) continue;
        if constexpr (kKeepsTerms) {
          C terms[kWidth], part = M::constant(0);
          Elements<T>::widen(terms, kHold ? raw[kHold ? p : 0] : pack_of(p));
#pragma unroll
          for (int i = 0; i < kWidth; ++i) part += terms[i] = Op::term(relative, &terms[i]);
          sum += part;
          if (rank + p * kThreads < packs) *at(0, rank + p * kThreads) = Elements<T>::narrow(terms);
        } else {
          const Pack pack[1] = {kHold ? raw[kHold ? p : 0] : pack_of(p)};
          sum += A::sum_of_terms(relative, pack);
        }
      }
      return {pivot, sum_over_lanes<32>(sum)};
    }
  }

  // `state` is the row's, `pivot` that of the warp whose packs these are.
  __device__ __forceinline__ void finish(const State<C>& state, C pivot) const {
    const A& access = args.access;
    const auto finished = Op::row(state);
    typename Op::Scale scale{};
    if constexpr (kKeepsTerms) scale = Op::term_scale(state, pivot);
    const auto result_of = [&](int j) {
      Pack raw[A::kInputs];
#pragma unroll
      for (int k = 0; k < A::kInputs; ++k) raw[k] = *at(k, j);
      if constexpr (kKeepsTerms) {
        C terms[kWidth];
        Elements<T>::widen(terms, raw[0]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) terms[i] = terms[i] * scale;
        return Elements<T>::narrow(terms);
      } else {
        return A::finish(finished, raw);
      }
    };
    const auto kept_of = [&](int j) { return access.kept_bits(row, args.mask_stride, first + j * kWidth, columns()); };
    T* const out = opaque(access.out + row.element + first_of(0));
    const int begin = whole_begin(), end = whole_end();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int j = rank + p * kThreads;
      if (j < begin || j >= end) continue;
      Pack result = result_of(j);
      if constexpr (A::kMasked) result = A::with_masked(result, kept_of(j));
      store_pack(out + p * kThreads * kWidth, result);
    }
    for_edges([&](int j) { access.store_parts(result_of(j), row, first + j * kWidth, columns(), kept_of(j)); });
  }

 private:
  // Puts pads in the place of a pack's elements that do not count.
  __device__ __forceinline__ void mend(int j, unsigned bits) const {
#pragma unroll
    for (int k = 0; k < A::kInputs; ++k) *at(k, j) = select_elements<T>(bits, *at(k, j), A::pad_pack(k));
  }
};

__device__ __forceinline__ int cluster_register(bool rank) {
  int value = rank ? 0 : 1;
#if __CUDA_ARCH__ >= 900
  if (rank) {
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  } else {
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  }
#endif
  return value;
}

// So that a multiprocessor has room for three blocks of three teams, or four of two operands, and no spills.
template <class A, Edges kEdges>
inline constexpr int kChunkRegisters = A::kInputs == 1                 ? (sizeof(typename A::C) == 8 ? 64 : 56)
                                       : kEdges == Edges::kParts       ? 80
                                       : kEdges == Edges::kPartsOfMany ? 56
                                                                       : 40;

// A block has one or more neighbouring chunks of a row, a team each. What is left of the row belongs to the other
// blocks of its cluster or, if there are words, to any.
template <class A, Edges kEdges>
__global__ void __maxnreg__((kChunkRegisters<A, kEdges>)) rows_in_chunks(const __grid_constant__ ChunkArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  constexpr int kWords = kStateWords<C>;
  constexpr int kThreads = Chunk<A, kEdges>::kThreads, kTeamWarps = Chunk<A, kEdges>::kWarps;
  extern __shared__ __align__(128) Pack shared[];
  __shared__ State<C> part[kMostTeams * kTeamWarps];
  __shared__ uint64_t words[kMostTeams * kMostBlocks * kWords];
  __shared__ uint64_t received;
  const int teams = blockDim.x / kThreads, team = threadIdx.x / kThreads;
  const int blocks = (args.chunks + teams - 1) / teams;  // of a row
  const int64_t row = blockIdx.x / blocks;
  const int begin = static_cast<int>(blockIdx.x - row * blocks) * teams;
  const bool clustered = cluster_register(false) > 1;
#if __CUDA_ARCH__ >= 900
  if (clustered) begin_exchange(&received, args.chunks * kWords * 8);
#endif

  const Chunk<A, kEdges> work(args, row, begin + team, shared + team * args.share * A::kInputs);
#pragma unroll
  for (int k = 0; k < A::kInputs; ++k) {
    const auto* const in = opaque(args.rows.access.in[k] + work.row.element + work.first_of(0));
#pragma unroll
    for (int p = 0; p < work.kPacks; ++p) {
      const int j = work.rank + p * kThreads;
      if (j >= work.copy_begin() && j < work.copy_end()) copy_pack(work.at(k, j), in + p * kThreads * A::kWidth);
    }
  }
  // Each thread reads only what it has copied itself, so that there is no need for a barrier.
  work.copy_beyond([&](int j) { return j % kThreads == work.rank; });
  wait_for_copies();
  const State<C> warp = work.warp_state();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = warp;
#if __CUDA_ARCH__ >= 900
  if (clustered) wait_until_all_have_begun();
#endif
  __syncthreads();
  State<C> state;
  if (args.words) {
    wait_for_previous_kernel();
    const WordsInMemory<C> exchange{args.words + row * args.chunks * kWords};
    state = combine_over_lanes<Op, M, kTeamWarps>(part[team * kTeamWarps + threadIdx.x % kTeamWarps]);
    if (work.rank == 0 && begin + team < args.chunks) exchange.publish(begin + team, state);
    state = await_row<Op, M>(exchange, args.chunks);
  } else if (clustered) {
    // One warp tells every block of the cluster, this one as well.
    const WordsInCluster<C> exchange{words, &received};
    if (threadIdx.x < 32) {
      for (int t = 0; t < teams && begin + t < args.chunks; ++t) {
        state = combine_over_lanes<Op, M, kTeamWarps>(part[t * kTeamWarps + threadIdx.x % kTeamWarps]);
        if (static_cast<int>(threadIdx.x) < blocks) exchange.publish(begin + t, state, threadIdx.x);
      }
      __syncwarp();
    }
#if __CUDA_ARCH__ >= 900
    wait_for_cluster(&received, 0);
#endif
    state = await_row<Op, M>(exchange, args.chunks);
  } else {
    // The chunks' states some lanes apart, whose sum has the same order as that of neighbouring lanes.
    static_assert(kMostTeams <= 4);
    const int lane = threadIdx.x % 32;
    state = identity<Op, M>();
    if (lane < teams * kTeamWarps) state = part[lane];
    state = combine_over_lanes<Op, M, kTeamWarps>(state);
    if (lane % kTeamWarps != 0) state = identity<Op, M>();
    state = combine_over_lanes<Op, M, 32>(state);
  }
  work.finish(state, warp.pivot);
}

}  // namespace jax_softmax::cuda
