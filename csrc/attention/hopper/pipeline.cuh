// What the kernels on Hopper share: rows in shared memory, how they pass, and products with them.
//
// A block has some warpgroups of 64 rows each, which compute, and a last one, which copies: the rows that stay once,
// and those that pass in each step to one of Tiling::stages places. Two barriers of a place say that its rows of q's
// features or those of v's features are there, two more that all warps have read them.
//
// Rows are in shared memory in panels of 64 features, as tensor maps with 128 bytes of swizzling copy them and `wgmma`
// reads them. Side operands pass as in scores.cuh, and the numbers of queries as in backward.cuh, together with the
// rows of v's features.
#pragma once

#include "attention/hopper/warpgroup.cuh"
#include "attention/scores.cuh"

namespace jax_softmax::device {

using attention::kBytesOfPanelRow;
using attention::KernelKind;
using attention::kMapDims;
using attention::kPanel;
using attention::kRowsOfWarpgroup;
using attention::kWarpgroup;

// A matrix in shared memory, as copies of boxes lay it out. `panel`: bytes from 64 columns to the next 64, if the
// columns are not those of the sum.
__device__ __forceinline__ uint64_t descriptor(Address first, int panel) {
  return static_cast<uint64_t>((first & 0x3ffff) >> 4) | static_cast<uint64_t>(panel >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;  // 1024 bytes from 8 rows to the next 8; swizzled
}

// Sets the indices, in the tensor map of an operand, of a row of batch index n.
template <class P>
__device__ __forceinline__ void locate(int (&at)[kMapDims], int operand, unsigned n, int row) {
  int index[P::kBatchDims + 1];
#pragma unroll
  for (int d = P::kBatchDims - 1; d >= 0; --d) {
    const unsigned extent = P::kExtents[d];
    index[d] = static_cast<int>(d == 0 ? n : n % extent);
    if (d > 0) n /= extent;
  }
#pragma unroll
  for (int d = 1; d < kMapDims; ++d) {
    const int of = P::kMapDims[operand][d - 1];
    at[d] = of == -2 ? 0 : of == -1 ? row : index[of];
  }
}

// Rows in shared memory: panels of 64 features, one behind the other.
template <int rows, int features>
struct Panels {
  static constexpr int kRows = rows, kFeatures = features;
  static constexpr int kPanels = ceil_div(features, kPanel), kPanelBytes = rows * kBytesOfPanelRow;
  static constexpr int kBytes = kPanels * kPanelBytes;
  Address base;

  // Of 16 features from 16 k on, of all rows from `row` on; and of all features, of 16 rows from 16 k on. Constants are
  // added to a descriptor: one instruction for each product.
  __device__ __forceinline__ uint64_t of_features(int row, int k) const {
    return descriptor(base + row * kBytesOfPanelRow, 0) + (k / 4 * kPanelBytes + k % 4 * 32) / 16;
  }
  __device__ __forceinline__ uint64_t of_rows(int k) const {
    return descriptor(base, kPanelBytes) + k * kMma * kBytesOfPanelRow / 16;
  }
  // Copies an operand's rows of batch index n, from `row` on.
  template <class P>
  __device__ __forceinline__ void begin_copy(const typename P::Addresses& operands, int operand, unsigned n, int row,
                                             Address barrier) const {
    int at[kMapDims];
    locate<P>(at, operand, n, row);
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      at[0] = p * kPanel;
      begin_copy_of_box(base + p * kPanelBytes, operands.maps[operand], at, barrier);
    }
  }
};

// s = a b^T of a warpgroup: of the 64 rows of a from `row` on.
template <class T, int columns, class A, class B>
__device__ __forceinline__ void begin_product_of_rows(Accumulators<1, columns>& s, A a, int row, B b) {
#pragma unroll
  for (int k = 0; k < ceil_div(A::kFeatures, kMma); ++k) {
    WarpgroupProduct<T, columns>::add_rows(s.values[0], a.of_features(row, k), b.of_features(0, k), k == 0);
  }
}
// c += p b, of p as `narrow` makes it.
template <class T, int columns, int depth, class B>
__device__ __forceinline__ void begin_product(Accumulators<1, columns>& c, const uint32_t (&p)[depth][4], B b) {
#pragma unroll
  for (int k = 0; k < depth; ++k) WarpgroupProduct<T, columns>::add_columns(c.values[0], p[k], b.of_rows(k));
}
template <class T, int columns>
__device__ __forceinline__ void narrow(uint32_t (&p)[columns / kMma][4], const Accumulators<1, columns>& s) {
#pragma unroll
  for (int i = 0; i < columns / 8; ++i) {
    const float (&x)[4] = s.values[0][i];
    p[i / 2][i % 2 * 2] = narrowed<T>(x[0], x[1]);
    p[i / 2][i % 2 * 2 + 1] = narrowed<T>(x[2], x[3]);
  }
}

// What a block has in shared memory: rows that stay, of q's and, in backward kernels, of v's features; those that pass
// in each of so many places; products that warpgroups hand on; queries' numbers, if queries pass; tiles of side
// operands; barriers.
template <class P, KernelKind kernel>
struct Pipeline {
  using N = Counts<P>;
  static constexpr bool kIsForward = kernel == KernelKind::kForward, kKeysStay = kernel == KernelKind::kKeys;
  using OwnD = Panels<N::kRows, P::kFeatures>;
  using OwnE = Panels<kIsForward ? 0 : N::kRows, P::kValueFeatures>;
  using D = Panels<N::kStep, P::kFeatures>;
  using E = Panels<N::kStep, P::kValueFeatures>;
  using Tile = ScoreTile<P, kKeysStay ? N::kStep : N::kRows, kKeysStay ? N::kRows : N::kStep>;
  static constexpr int kGroups = kKeysStay ? P::kGroups : 1;  // batch indices that pass, one after another
  static constexpr int kStay = kKeysStay ? P::kKeys : P::kQueries, kPass = kKeysStay ? P::kQueries : P::kKeys;
  static constexpr int kOwnBytes = OwnD::kBytes + OwnE::kBytes, kBytes = D::kBytes + E::kBytes;
  static constexpr int kHandedBytes = attention::bytes_of_handed_products(N::kTiling);
  static constexpr int kNumberBytes = kKeysStay ? N::kStep * attention::kBytesOfRow : 0;
  static constexpr bool kHasSides = Tile::kStagedBytes > 0, kAllCopy = kKeysStay || kHasSides;
  static constexpr int kWarps = N::kTiling.warps, kWarpgroups = kWarps / kWarpgroup, kPlaces = N::kTiling.stages;
  // Registers of each thread: at launch all have as many, then those that compute take what the others give.
  static constexpr int kLaunched = (1 << 16) / (N::kTiling.threads() * N::kTiling.resident) / 8 * 8;
  static constexpr int kLess = !kHasSides ? 24 : kKeysStay ? 40 : 96;
  static constexpr int kMore = ((kWarpgroups + 1) * kLaunched - kLess) / kWarpgroups / 8 * 8;

  int count = 0;  // of steps so far
  __device__ __forceinline__ int place() const { return count % kPlaces; }
  __device__ __forceinline__ int parity() const { return count / kPlaces % 2; }

  static __device__ __forceinline__ OwnD own_d() { return {shared_memory()}; }
  static __device__ __forceinline__ OwnE own_e() { return {shared_memory() + OwnD::kBytes}; }
  static __device__ __forceinline__ Address handed() { return shared_memory() + kOwnBytes + kPlaces * kBytes; }
  static __device__ __forceinline__ Address after_rows() { return handed() + kHandedBytes; }
  __device__ __forceinline__ D d() const { return {shared_memory() + kOwnBytes + place() * kBytes}; }
  __device__ __forceinline__ E e() const { return {d().base + D::kBytes}; }
  __device__ __forceinline__ Address numbers() const { return after_rows() + place() * kNumberBytes; }
  __device__ __forceinline__ Address sides() const {
    return after_rows() + kPlaces * kNumberBytes + place() * Tile::kStagedBytes;
  }
  static __device__ __forceinline__ Address barrier_of(int place, int which) {
    return after_rows() + kPlaces * (kNumberBytes + Tile::kStagedBytes) + (place * 4 + which) * 8;
  }
  __device__ __forceinline__ Address has_d() const { return barrier_of(place(), 0); }
  __device__ __forceinline__ Address has_e() const { return barrier_of(place(), 1); }
  __device__ __forceinline__ Address d_is_read() const { return barrier_of(place(), 2); }
  __device__ __forceinline__ Address e_is_read() const { return barrier_of(place(), 3); }

  __device__ __forceinline__ Tile tile(const SideOffsets<P>& offsets, int block, int step) const {
    const int stay = block * N::kRows, pass = step * N::kStep;
    return {offsets, sides(), kKeysStay ? pass : stay, kKeysStay ? stay : pass};
  }

  // Writes products for the thread of another warpgroup that has the same ones, or reads those of the other.
  template <bool writes, int columns>
  static __device__ __forceinline__ void hand_on(Accumulators<1, columns>& s) {
    const Address own = handed() + threadIdx.x % 128 * 16;
#pragma unroll
    for (int c = 0; c < columns / 8; ++c) {
      if constexpr (writes) {
        write_shared(own + c * 128 * 16, s.values[0][c]);
      } else {
        read_shared(s.values[0][c], own + c * 128 * 16);
      }
    }
  }

  static __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int place = 0; place < kPlaces; ++place) {
        init_barrier(barrier_of(place, 0), 1);
        init_barrier(barrier_of(place, 1), kAllCopy ? 1 + N::kThreads : 1);
        init_barrier(barrier_of(place, 2), kWarps);
        init_barrier(barrier_of(place, 3), kWarps);
      }
      publish_barriers();
    }
    barrier();
  }

  // What the last warpgroup does for a block of batch index n: one thread copies rows, and all copy numbers and sides.
  static __device__ __forceinline__ void copy_for_others(const typename P::Addresses& operands, unsigned n, int block) {
    using namespace attention;
    const bool leads = threadIdx.x % N::kThreads == 0;
    if (!kAllCopy && !leads) return;
    Pipeline pipe;
    for (int group = 0; group < kGroups; ++group) {
      const unsigned batch = n + group;
      const Range range = visited<P>(operands, batch, block, kStay, kPass);
      const SideOffsets<P> offsets(operands, batch);
      for (int step = range.first; step < range.last; ++step, ++pipe.count) {
        const int row = step * N::kStep, own_row = block * N::kRows;
        wait(pipe.d_is_read(), 1 - pipe.parity());
        if (leads) {
          const bool begins = pipe.count == 0;  // what stays is there with the first rows
          const Address barrier = pipe.has_d();
          arrive_and_expect(barrier, D::kBytes + (begins ? kOwnBytes : 0));
          if (begins) {
            pipe.own_d().template begin_copy<P>(operands, kKeysStay ? kK : kQ, n, own_row, barrier);
            if constexpr (!kIsForward) {
              pipe.own_e().template begin_copy<P>(operands, kKeysStay ? kV : kOCotangent, n, own_row, barrier);
            }
          }
          pipe.d().template begin_copy<P>(operands, kKeysStay ? kQ : kK, batch, row, barrier);
        }
        wait(pipe.e_is_read(), 1 - pipe.parity());
        if (leads) {
          arrive_and_expect(pipe.has_e(), E::kBytes);
          pipe.e().template begin_copy<P>(operands, kKeysStay ? kOCotangent : kV, batch, row, pipe.has_e());
        }
        if constexpr (kAllCopy) {
          if constexpr (kKeysStay) begin_copy_of_numbers<P>(pipe.numbers(), operands, batch, row);
          pipe.tile(offsets, block, step).begin_copies();
          arrive_after_copies(pipe.has_e());
        }
      }
    }
  }

  // Begins a block of batch index n, of which the last warpgroup copies. Returns whether this warpgroup computes.
  static __device__ __forceinline__ bool computes(const typename P::Addresses& operands, unsigned n, int block) {
    init();
    if (own_warpgroup() == kWarpgroups) {
      give_registers<kLess>();
      copy_for_others(operands, n, block);
      return false;
    }
    take_registers<kMore>();
    return true;
  }
};

}  // namespace jax_softmax::device
