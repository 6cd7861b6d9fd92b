// Rows in shared memory, and their products on tensor cores.
#pragma once

#include "attention/blocks.cuh"

namespace jax_softmax::device {

using attention::kBytesOfPack;
using attention::kStages;

// ---- Tiles

// Rows of numbers in shared memory.
template <class T, int columns>
struct SharedRows {
  static constexpr int kPerPack = kBytesOfPack / static_cast<int>(sizeof(T)), kPacks = columns / kPerPack;
  static constexpr int kPitch = attention::pitch(columns, sizeof(T)), kBytes = kBytesOfPack * kPitch;
  Address base;

  __device__ __forceinline__ Address pack(int row, int pack) const {
    if constexpr (kPacks % 8 == 0) pack ^= row % 8;
    return base + (row * kPitch + pack) * kBytesOfPack;
  }
  __device__ __forceinline__ Address number(int row, int column) const {
    return pack(row, column / kPerPack) + column % kPerPack * static_cast<int>(sizeof(T));
  }
};

// Calls f(row, pack) for the thread's share of rows x packs. Neighbouring threads have neighbouring packs; if a row's
// packs divide the threads, the row of a turn is a constant more than that of the turn before.
template <int threads, int rows, int packs, class F>
__device__ __forceinline__ void for_own_packs(const F& f) {
  constexpr int kTurns = ceil_div(rows * packs, threads);
  const int first = threadIdx.x % threads;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int p = first + turn * threads;
    if (rows * packs % threads != 0 && p >= rows * packs) return;
    if constexpr (threads % packs == 0) {
      f(first / packs + turn * (threads / packs), first % packs);
    } else {
      f(p / packs, p % packs);
    }
  }
}

// Begins to copy `count` rows, from `first` on, of an operand of rows x features. What does not exist is 0.
template <class P, int count, int rows, int features, int columns>
__device__ __forceinline__ void begin_copy_of_rows(SharedRows<typename P::T, columns> to, const typename P::T* operand,
                                                   int64_t stride, int first) {
  using Rows = SharedRows<typename P::T, columns>;
  constexpr int kPerPack = Rows::kPerPack;
  for_own_packs<Counts<P>::kThreads, count, Rows::kPacks>([&](int row, int pack) {
    const bool row_exists = rows % count == 0 || first + row < rows;
    const bool exists = row_exists && (features == columns || pack * kPerPack < features);
    begin_copy<16>(to.pack(row, pack), exists ? operand + (first + row) * stride + pack * kPerPack : operand, exists);
  });
}

// Rounds the packs that the thread copied, as products read float32 as TF32. Others read them behind a barrier.
template <class P, int count, class T, int columns>
__device__ __forceinline__ void round_own_packs(SharedRows<T, columns> rows) {
  if constexpr (sizeof(T) == 4) {
    for_own_packs<Counts<P>::kThreads, count, rows.kPacks>([&](int row, int pack) {
      float x[4];
      read_shared(x, rows.pack(row, pack));
#pragma unroll
      for (float& number : x) number = __uint_as_float(rounded_to_tf32(number));
      write_shared(rows.pack(row, pack), x);
    });
  }
}

// Rows of keys and of values, or of queries and of the output's cotangent.
template <class P, int count>
struct SharedRowPair {
  using OfD = SharedRows<typename P::T, Counts<P>::kDepth>;
  using OfE = SharedRows<typename P::T, Counts<P>::kWidth>;
  static constexpr int kBytes = count * (OfD::kBytes + OfE::kBytes);
  OfD d;
  OfE e;
  __device__ __forceinline__ explicit SharedRowPair(Address base) : d{base}, e{base + count * OfD::kBytes} {}
  __device__ __forceinline__ void round_own_packs() const {
    device::round_own_packs<P, count>(d);
    device::round_own_packs<P, count>(e);
  }
};

// Two places in shared memory for what passes: a step reads one while the next step's is copied to the other. After a
// step their addresses are exchanged. They are not numbered by `step % 2`: of the first step ptxas 13.0 makes
// `(step + 1) % 2` 0 instead of 1 in some kernels, so that the next step's rows overwrite those that are read.
struct Places {
  Address read, copied;

  __device__ __forceinline__ Places(Address begin, int bytes) : read(begin), copied(begin + bytes) {}
  __device__ __forceinline__ void exchange() {
    const Address other = read;
    read = copied;
    copied = other;
  }
};
static_assert(kStages == 2, "Places has two");

// ---- Products

// A warp's part of a product. Of each fragment of rows and each 8 columns, lane l has two neighbours, from row l / 4
// and column 2 (l % 4) on, and the two of 8 rows further down.
template <int fragments, int columns>
struct Accumulators {
  float values[fragments][columns / 8][4];

  __device__ __forceinline__ Accumulators() {
    each([](float& x, int, int) { x = 0.0f; });
  }
  // f(element, row, column), where row and column are those of lane 0.
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
#pragma unroll
      for (int n = 0; n < columns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(values[m][n][e], m * kMma + e / 2 * 8, n * 8 + e % 2);
      }
    }
  }
};
__device__ __forceinline__ int own_row() { return lane() / 4; }
__device__ __forceinline__ int own_column() { return lane() % 4 * 2; }
// The sum of what the four lanes of a row have.
__device__ __forceinline__ float sum_of_row(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// c (rows x columns) += a (rows x depth) b^T (depth x columns): a are the rows from `row` on, b those from `column` on.
template <class T, int fragments, int columns, int depth>
__device__ __forceinline__ void add_product_of_rows(Accumulators<fragments, columns>& c, SharedRows<T, depth> a,
                                                    int row, SharedRows<T, depth> b, int column = 0) {
  const int l = lane();
#pragma unroll
  for (int k = 0; k < a.kPacks / 2; ++k) {
    uint32_t own[fragments][4];
#pragma unroll
    for (int m = 0; m < fragments; ++m) load_matrices(own[m], a.pack(row + m * kMma + l % 16, 2 * k + l / 16));
#pragma unroll
    for (int n = 0; n < columns / kMma; ++n) {
      uint32_t others[4];
      load_matrices(others, b.pack(column + n * kMma + l % 8 + l / 16 * 8, 2 * k + l / 8 % 2));
#pragma unroll
      for (int m = 0; m < fragments; ++m) {
        multiply_add<T>(c.values[m][2 * n], own[m], others[0], others[1]);
        multiply_add<T>(c.values[m][2 * n + 1], own[m], others[2], others[3]);
      }
    }
  }
}

// c (rows x columns) += p (rows x depth, rounded) b (depth x columns): b has `depth` rows, of which the columns from
// `first` on count.
template <class T, int fragments, int columns, int depth, int width>
__device__ __forceinline__ void add_product(Accumulators<fragments, columns>& c,
                                            const Accumulators<fragments, depth>& p, SharedRows<T, width> b,
                                            int first = 0) {
  const int l = lane();
#pragma unroll
  for (int k = 0; k < depth / kMma; ++k) {
    uint32_t own[fragments][4];
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&x)[4] = p.values[m][2 * k + half];
        own[m][2 * half] = narrowed<T>(x[0], x[1]);
        own[m][2 * half + 1] = narrowed<T>(x[2], x[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < columns / kMma; ++n) {
      uint32_t others[4];
      load_transposed(others, b.pack(k * kMma + l % 16, first / b.kPerPack + 2 * n + l / 16));
#pragma unroll
      for (int m = 0; m < fragments; ++m) {
        multiply_add<T>(c.values[m][2 * n], own[m], others[0], others[1]);
        multiply_add<T>(c.values[m][2 * n + 1], own[m], others[2], others[3]);
      }
    }
  }
}

// The same in TF32, of eight rows of b at a time. A product's depth may be counted in any order that both operands
// have: where an instruction has the rows t and t + 4, these are the rows 2 t and 2 t + 1, as the accumulators have
// them. The order of a row's packs is that of the eighth row before it, and repeats after eight packs.
template <int fragments, int columns, int depth, int width>
__device__ __forceinline__ void add_product(Accumulators<fragments, columns>& c,
                                            const Accumulators<fragments, depth>& p, SharedRows<float, width> b,
                                            int first = 0) {
  constexpr int kPacks = 8, kPeriod = kPacks * b.kPerPack / 8;
  Address begin[kPeriod][2];
#pragma unroll
  for (int n = 0; n < kPeriod; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) begin[n][e] = b.number(own_column() + e, first + n * 8 + own_row());
  }
#pragma unroll
  for (int k = 0; k < depth / 8; ++k) {
    uint32_t own[fragments][4];
#pragma unroll
    for (int m = 0; m < fragments; ++m) {
      const float (&x)[4] = p.values[m][k];
#pragma unroll
      for (int e = 0; e < 4; ++e) own[m][e % 2 * 2 + e / 2] = rounded_to_tf32(x[e]);
    }
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      uint32_t others[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Address from = begin[n % kPeriod][e] + k * 8 * b.kBytes + n / kPeriod * kPacks * kBytesOfPack;
        others[e] = __float_as_uint(read_shared_as<float>(from));
      }
#pragma unroll
      for (int m = 0; m < fragments; ++m) multiply_add<float>(c.values[m][n], own[m], others[0], others[1]);
    }
  }
}

// Writes c to rows from `row` on and columns from `first` on, below `existing` and `features`: of two neighbours x and
// y pair(x, y), which has the bits of both.
template <class T, int fragments, int columns, class Pair>
__device__ __forceinline__ void write(T* to, int64_t stride, const Accumulators<fragments, columns>& c, int row,
                                      int existing, int first, int features, const Pair& pair) {
#pragma unroll
  for (int m = 0; m < fragments; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to_row = row + m * kMma + half * 8 + own_row();
      if (to_row >= existing) continue;
#pragma unroll
      for (int n = 0; n < columns / 8; ++n) {
        const int column = first + n * 8 + own_column();
        if (column >= features) continue;
        const float* x = c.values[m][n] + 2 * half;
        auto both = pair(x[0], x[1]);
        *reinterpret_cast<decltype(both)*>(to + to_row * stride + column) = both;
      }
    }
  }
}

}  // namespace jax_softmax::device
