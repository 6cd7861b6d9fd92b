// The schedule for rows of few elements in few lines, which may begin anywhere in a pack: a block has a strip of
// neighbouring columns of all of them in shared memory, into which it reads whole packs and out of which it writes
// them. A column is a row of the view: one element of each line, or several neighbouring ones. Small arrays of such
// lines that follow one another in memory are seen as one line, in which each has all of its rows. A thread holds all
// of a column, or a team of lanes its parts.
#pragma once

#include "cuda/access.cuh"
#include "cuda/copies.cuh"
#include "cuda/reduce.cuh"

namespace jax_softmax::cuda {

template <class A>
struct StripArgs {
  A access;
  Tile tile;
  Strided kept, lines, in_unit, in_line;
  Divisor packs, segment_tiles, inner, unit_columns;
  int team_shift;  // a power of 2
};

// Up to kHeld elements of a column to a thread.
template <class A, int kHeld, int kTogether = strip_columns(kHeld, A::kInputs)>
__global__ void __launch_bounds__(kStripThreads) rows_in_strips(const __grid_constant__ StripArgs<A> args) {
  using Op = typename A::Op;
  using M = typename A::M;
  using C = typename A::C;
  using T = typename A::T;
  constexpr int kWidth = A::kWidth, kInputs = A::kInputs, kBytes = sizeof(T);
  constexpr int kBatch = kHeld < 16 ? kHeld / 4 : 4, kPlaces = kHeld + kStripSpare;
  extern __shared__ __align__(128) Pack held[];
  const A& access = args.access;
  const Tile& tile = args.tile;
  const int lines = tile.all_lines, packs = lines * tile.packs, inner = args.inner.divisor;
  const int team = 1 << args.team_shift;
  // In bytes: where the elements of a column are in `held` if it is the first one, by lane of the team; and for each
  // line, where its part of the strip would begin in memory if the packs before it in `held` came before it there.
  int* const held_at = reinterpret_cast<int*>(held + kInputs * packs);
  int64_t* const line_at = reinterpret_cast<int64_t*>(held_at + team * kPlaces);
  [[maybe_unused]] int64_t* const mask_at = line_at + lines;  // as held_at is, in the mask

  const int number = args.segment_tiles.divide(blockIdx.x);
  const int64_t first_unit = static_cast<int64_t>(blockIdx.x - number * tile.segment_tiles) * tile.width;
  const int units = static_cast<int>(min(static_cast<int64_t>(tile.width), tile.segment_units - first_unit));
  const int columns = units * tile.columns;
  for (int i = threadIdx.x; i < team * kHeld; i += blockDim.x) {
    const int lane = i / kHeld, u = i - lane * kHeld, element = min(lane * tile.held + u, lines * inner - 1);
    const int line = args.inner.divide(element), index = element - line * inner;
    unsigned ignored;
    const Offset in_line = args.in_line.at(index, &ignored);
    const Offset begin = args.kept.at(number, &ignored) + args.lines.at(line, &ignored) +
                         Offset{first_unit * tile.unit, first_unit * tile.outer_mask};
    const int shift = static_cast<int>(begin.element) & (kWidth - 1), before = line * tile.packs * kWidth;
    held_at[lane * kPlaces + u] = (before + shift + static_cast<int>(in_line.element)) * kBytes;
    if constexpr (A::kMasked) mask_at[lane * kPlaces + u] = begin.mask + in_line.mask;
    if (index == 0 && element == lane * tile.held + u && u < tile.held) {
      line_at[line] = (begin.element - before) * kBytes;
    }
  }
  __syncthreads();
  const int64_t last = access.elements * kBytes - kPackBytes;
#pragma unroll 4
  for (int u = threadIdx.x; u < packs; u += blockDim.x) {
    const int64_t begin = (line_at[args.packs.divide(u)] & -kPackBytes) + u * kPackBytes;
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

  const int lane = threadIdx.x & (team - 1), step = blockDim.x >> args.team_shift;
  // Elements that this lane of a team has, and that all lanes have.
  const int mine = max(min(tile.held, lines * inner - lane * tile.held), 0);
  const int of_all = max(min(tile.held, lines * inner - (team - 1) * tile.held), 0);
  // Read some at a time, since the compiler does not see that writes to elements leave them alone.
  struct alignas(kBatch * sizeof(int)) Places {
    int at[kBatch];
  };
  const Places* const places = reinterpret_cast<const Places*>(held_at + lane * kPlaces);
  // A warp stays together.
  const int first_of_warp = threadIdx.x / 32 * 32 >> args.team_shift;
  for (int turn = 0; first_of_warp + turn < columns; turn += kTogether * step) {
    const int first = (threadIdx.x >> args.team_shift) + turn;
    bool there[kTogether];
    char* element[kTogether];
    int64_t mask[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      there[j] = first + j * step < columns;
      const int column = there[j] ? first + j * step : first;
      int unit = column;
      Offset in_unit{0, 0};
      if (tile.columns > 1) {
        unsigned ignored;
        unit = args.unit_columns.divide(column);
        in_unit = args.in_unit.at(column - unit * tile.columns, &ignored);
      }
      element[j] = reinterpret_cast<char*>(held) + (unit * tile.unit + static_cast<int>(in_unit.element)) * kBytes;
      mask[j] = unit * tile.outer_mask + in_unit.mask;
    }
    const int n = there[0] ? mine : 0;
    // Much gains by questions that a whole warp answers alike; little loses more by the vote.
    constexpr bool kVotes = kHeld * kBytes > 32;
    const int together = kVotes ? (__all_sync(kFullWarp, there[0]) ? of_all : 0) : n;
    C values[kTogether][kHeld][kInputs];
    // Calls use(u, place) for the thread's elements; some at a time are there or not.
    const auto for_elements = [&](auto use) {
#pragma unroll
      for (int b = 0; b < kHeld; b += kBatch) {
        const Places batch = places[b / kBatch];
        if (b + kBatch <= together) {
#pragma unroll
          for (int u = 0; u < kBatch; ++u) use(b + u, batch.at[u]);
        } else if (!kVotes || b < tile.held) {
#pragma unroll
          for (int u = 0; u < kBatch; ++u) {
            if (b + u < n) use(b + u, batch.at[u]);
          }
        }
      }
    };
    const auto mask_of = [&](int u, int j) { return A::kMasked ? mask_at[lane * kPlaces + u] + mask[j] : 0; };
    // Brings together what the lanes of a team have of a column.
    const auto over_team = [&](C(&value)[kTogether], auto combine) {
      for (int offset = team / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          value[j] = combine(value[j], __shfl_xor_sync(kFullWarp, value[j], offset));
        }
      }
    };
    C pivot[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) pivot[j] = M::constant(Op::kHasPivot ? -M::kInfinity : 0);
    for_elements([&](int u, int place) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const char* const from = element[j] + place;
#pragma unroll
        for (int k = 0; k < kInputs; ++k) {
          values[j][u][k] = Elements<T>::widen(*reinterpret_cast<const T*>(from + k * packs * kPackBytes));
        }
        if constexpr (A::kMasked) access.pad_if_masked(values[j][u], {0, mask_of(u, j)});
        if constexpr (Op::kHasPivot) pivot[j] = M::max(pivot[j], values[j][u][0]);
      }
    });
    if constexpr (Op::kHasPivot) over_team(pivot, [](C a, C b) { return M::max(a, b); });
    Relative<M> relative[kTogether];
    C sum[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      relative[j] = Relative<M>(pivot[j]);
      sum[j] = M::constant(0);
    }
    for_elements([&](int u, int) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const C term = Op::term(relative[j], values[j][u]);
        if constexpr (Op::kResultIsScaledTerm) values[j][u][0] = term;
        sum[j] += term;
      }
    });
    over_team(sum, [](C a, C b) { return a + b; });
    typename Op::Row row[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) row[j] = Op::row({pivot[j], sum[j]});
    for_elements([&](int u, int place) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        C result;
        if constexpr (Op::kResultIsScaledTerm) {
          result = values[j][u][0] * row[j].scale;
        } else {
          result = Op::finish(row[j], values[j][u]);
        }
        if (j == 0 || there[j]) {
          *reinterpret_cast<T*>(element[j] + place) = access.result(result, {0, mask_of(u, j)});
        }
      }
    });
  }
  __syncthreads();

#pragma unroll 4
  for (int u = threadIdx.x; u < packs; u += blockDim.x) {
    const int line = args.packs.divide(u);
    const int64_t begin = line_at[line];
    const int shift = static_cast<int>(begin & (kPackBytes - 1)) / kBytes;
    const int first = (u - line * tile.packs) * kWidth - shift;  // of the elements of the line's part
    T* const to = reinterpret_cast<T*>(reinterpret_cast<char*>(access.out) + (begin & -kPackBytes) + u * kPackBytes);
    if (first >= 0 && first + kWidth <= units * tile.unit) {
      store_pack(to, held[u]);
    } else {
      store_elements(to, held[u], A::bits_within(first, units * tile.unit));
    }
  }
}

}  // namespace jax_softmax::cuda
