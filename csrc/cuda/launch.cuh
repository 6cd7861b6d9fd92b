// From a plan to the kernel that it names, for one operator and one storage type.
#pragma once

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <utility>

#include "cuda/chunk.cuh"
#include "cuda/cuda.h"
#include "cuda/passes.cuh"
#include "cuda/ring.cuh"
#include "cuda/slab.cuh"
#include "cuda/strided.cuh"
#include "cuda/strips.cuh"
#include "cuda/tile.cuh"
#include "cuda/tile_passes.cuh"

namespace jax_softmax::cuda {

// What a launch is told beyond its size.
enum class Mode {
  kPlain,
  kCooperative,  // all blocks run at once
  kOverlapping,  // blocks may start before the previous kernel has ended, which they wait for themselves
};

template <class... Args>
cudaError_t enqueue(void (*kernel)(Args...), const CudaPlan& plan, cudaStream_t stream, Mode mode,
                    const Args&... args) {
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
  };
  cudaError_t status = cudaSuccess;
  // The limit is the kernel's, whichever thread launches it: until this one has, nobody may set another.
  static std::mutex mutex;
  std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
  if (plan.shared_bytes > 40 << 10) {
    lock.lock();
    status = set(cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  }
  if (status == cudaSuccess && plan.cluster > 8) status = set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  const auto add = [&](cudaLaunchAttributeID id) {
    attributes[config.numAttrs].id = id;
    return &attributes[config.numAttrs++].val;
  };
  if (plan.cluster > 1)
    add(cudaLaunchAttributeClusterDimension)->clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  if (mode == Mode::kCooperative) add(cudaLaunchAttributeCooperative)->cooperative = 1;
  if (mode == Mode::kOverlapping) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization)->programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = attributes;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <class... Args>
cudaError_t enqueue(void (*kernel)(Args...), const CudaPlan& plan, cudaStream_t stream, const Args&... args) {
  return enqueue(kernel, plan, stream, Mode::kPlain, args...);
}

// lanes * 10 + packs; plan.cc chooses among the same.
using LanesAndPacks =
    std::integer_sequence<int, 11, 21, 41, 42, 43, 82, 83, 162, 163, 165, 322, 323, 324, 325, 326, 328>;

// Kernels are picked from the plan's run-time numbers by trying each number that is compiled in; cudaErrorInvalidValue
// means that the plan asks for one that is not.
template <class A, int kLanes, int kPacks>
cudaError_t enqueue_lanes(const CudaPlan& plan, const RowArgs<A>& args, cudaStream_t stream) {
  if constexpr (!A::kMasked) {
    if (plan.edges != Edges::kParts)
      return enqueue(rows_in_lanes<A, kLanes, kPacks, Edges::kWhole>, plan, stream, args);
  }
  return enqueue(rows_in_lanes<A, kLanes, kPacks, Edges::kParts>, plan, stream, args);
}

// Tries each combination that is compiled in.
template <class A, int... lanes_and_packs>
cudaError_t enqueue_any_lanes(std::integer_sequence<int, lanes_and_packs...>, const CudaPlan& plan,
                              const RowArgs<A>& args, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  const int wanted = plan.lanes * 10 + plan.packs;
  (void)((wanted == lanes_and_packs &&
          (status = enqueue_lanes<A, lanes_and_packs / 10, lanes_and_packs % 10>(plan, args, stream), true)) ||
         ...);
  return status;
}

template <class A>
cudaError_t enqueue_block(const CudaPlan& plan, const RowArgs<A>& args, cudaStream_t stream) {
  if constexpr (!A::kMasked) {
    if (plan.packs == 8) {
      if (plan.edges == Edges::kNone) return enqueue(rows_in_block<A, 8, Edges::kNone>, plan, stream, args);
      return enqueue(rows_in_block<A, 8, Edges::kWhole>, plan, stream, args);
    }
    if (plan.edges == Edges::kNone) return enqueue(rows_in_block<A, 4, Edges::kNone>, plan, stream, args);
    if (plan.edges == Edges::kWhole) return enqueue(rows_in_block<A, 4, Edges::kWhole>, plan, stream, args);
  }
  return enqueue(rows_in_block<A, 4, Edges::kParts>, plan, stream, args);
}

// Prepares the words that blocks exchange states through.
inline cudaError_t enqueue_clear(uint64_t* words, int64_t n, cudaStream_t stream) {
  CudaPlan plan{};
  plan.cluster = 1;
  plan.threads = 256;
  plan.blocks = n / plan.threads + 1;
  return enqueue(clear_words, plan, stream, words, n);
}

template <class A>
cudaError_t enqueue_chunks(const CudaPlan& plan, const RowArgs<A>& rows, uint64_t* words, cudaStream_t stream) {
  const ChunkArgs<A> args{
      rows,       plan.scratch ? words : nullptr,   plan.chunks, static_cast<int>(plan.share), plan.stages, plan.spare,
      plan.again, Divisor(plan.chunks + plan.again)};
  if (plan.scratch) {
    const cudaError_t status = enqueue_clear(words, rows.rows * plan.chunks * kStateWords<typename A::C>, stream);
    if (status != cudaSuccess) return status;
  }
  const auto go = [&](auto edges) {
    constexpr Edges kEdges = decltype(edges)::value;
    if (plan.schedule == Schedule::kRing) {
      return enqueue(rows_in_ring<A, kEdges>, plan, stream, Mode::kCooperative, args);
    }
    return enqueue(rows_in_chunks<A, kEdges>, plan, stream, plan.scratch ? Mode::kOverlapping : Mode::kPlain, args);
  };
  if constexpr (!A::kMasked) {
    if (plan.edges == Edges::kNone || plan.edges == Edges::kWhole) {
      return go(std::integral_constant<Edges, Edges::kWhole>());
    }
  }
  if constexpr (A::kInputs == 2) {
    if (plan.edges == Edges::kPartsOfMany) return go(std::integral_constant<Edges, Edges::kPartsOfMany>());
  }
  return go(std::integral_constant<Edges, Edges::kParts>());
}

// Puts the states of rows' pieces together.
template <class A>
cudaError_t enqueue_combine(State<typename A::C>* states, int pieces, int columns, int64_t rows, cudaStream_t stream) {
  CudaPlan plan{};
  plan.cluster = 1;
  plan.threads = kPassThreads;
  plan.blocks = (rows + kPassThreads / 32 - 1) / (kPassThreads / 32);
  return enqueue(combine_pieces<typename A::Op, typename A::M>, plan, stream, Mode::kOverlapping, states, pieces,
                 columns, rows);
}

template <class A>
cudaError_t enqueue_passes(CudaPlan plan, const RowArgs<A>& rows, void* scratch, cudaStream_t stream) {
  auto* const states = static_cast<State<typename A::C>*>(scratch);
  // Wherever a row begins in a pack.
  const int64_t packs = (rows.columns + 2 * (A::kWidth - 1)) / A::kWidth;
  const int64_t part = kPassThreads * kFinishPacks, parts = (packs + part - 1) / part;
  const PassArgs<A> args{rows, states, plan.chunks, plan.share, Divisor(parts)};
  cudaError_t status = enqueue(sum_pieces<A>, plan, stream, args);
  if (status == cudaSuccess) status = enqueue_combine<A>(states, plan.chunks, 1, rows.rows, stream);
  plan.blocks = rows.rows * parts;
  if (status == cudaSuccess) status = enqueue(finish_parts<A>, plan, stream, Mode::kOverlapping, args);
  return status;
}

template <class A>
cudaError_t enqueue_packs(const CudaPlan& plan, const RowArgs<A>& args, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  const auto try_shape = [&](auto columns, auto inner) {
    constexpr int kColumns = decltype(columns)::value, kInner = decltype(inner)::value;
    constexpr int kElements = kColumns * kInner;
    constexpr bool kLogs = A::Op::kHasPivot && !A::Op::kResultIsScaledTerm;
    constexpr int kPacks = kElements > A::kWidth || (kLogs && kColumns > 1) ? 2 : 1;
    if constexpr (kElements < A::kWidth || (kInner > 1 && kElements <= 2 * A::kWidth)) {
      if (args.columns == kColumns && std::max(plan.slab_inner, 1) == kInner && plan.packs == kPacks) {
        status = enqueue(rows_in_packs<A, kColumns, kInner, kPacks>, plan, stream, args);
      }
    }
  };
  if constexpr (!A::kMasked) {
    const auto choose = [&](auto columns, auto... inner) { (try_shape(columns, inner), ...); };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> two;
    constexpr std::integral_constant<int, 4> four;
    constexpr std::integral_constant<int, 8> eight;
    choose(one, one);
    choose(two, one, two, four, eight);
    choose(four, one, two, four);
    choose(eight, two);
  }
  return status;
}

inline int log2_of(int power) {
  int log = 0;
  while ((1 << log) < power) ++log;
  return log;
}

template <int lanes, int held, bool interleaved = false>
struct SlabShape {
  static constexpr int kLanes = lanes;
  static constexpr int kHeld = held;
  static constexpr bool kInterleaved = interleaved;
};

template <class A>
cudaError_t enqueue_slab(const CudaPlan& plan, const RowArgs<A>& args, cudaStream_t stream) {
  const SlabArgs slab{plan.slab_rows, log2_of(plan.slab_spread), Divisor(plan.slab_inner),
                      Divisor(plan.slab_pad ? args.columns * plan.slab_inner / A::kWidth : INT32_MAX)};
  cudaError_t status = cudaErrorInvalidValue;
  const auto try_shape = [&](auto shape) {
    using Shape = decltype(shape);
    if (plan.lanes != Shape::kLanes || plan.packs != Shape::kHeld || (plan.slab_inner > 0) != Shape::kInterleaved) {
      return;
    }
    status = enqueue(rows_in_slab<A, Shape::kLanes, Shape::kHeld, Shape::kInterleaved>, plan, stream, args, slab);
  };
  const auto choose = [&](auto... shapes) { (try_shape(shapes), ...); };
  constexpr bool k64 = sizeof(typename A::T) == 8;  // whose shapes differ less from one to the next
  if constexpr (k64) {
    choose(SlabShape<1, 3>(), SlabShape<1, 7>(), SlabShape<1, 11>(), SlabShape<1, 15>(), SlabShape<2, 9>(),
           SlabShape<2, 11>(), SlabShape<2, 13>(), SlabShape<2, 15>(), SlabShape<2, 17>(), SlabShape<4, 10>(),
           SlabShape<4, 14>(), SlabShape<8, 10>(), SlabShape<8, 14>(), SlabShape<16, 10>(), SlabShape<16, 14>(),
           SlabShape<32, 10>(), SlabShape<32, 14>());
  } else {
    choose(SlabShape<1, 3>(), SlabShape<1, 7>(), SlabShape<1, 15>(), SlabShape<1, 23>(), SlabShape<1, 31>(),
           SlabShape<2, 17>());
  }
  if constexpr (kSlabOfPairs<A, 32, false>) {
    choose(SlabShape<4, 10>(), SlabShape<4, 12>(), SlabShape<4, 16>());
    if constexpr (A::kInputs == 1) {
      choose(SlabShape<4, 20>(), SlabShape<4, 24>(), SlabShape<4, 32>(), SlabShape<8, 20>(), SlabShape<8, 24>(),
             SlabShape<8, 32>(), SlabShape<16, 20>(), SlabShape<16, 24>(), SlabShape<16, 32>());
    } else {
      choose(SlabShape<8, 10>(), SlabShape<8, 12>(), SlabShape<8, 16>(), SlabShape<16, 10>(), SlabShape<16, 12>(),
             SlabShape<16, 16>(), SlabShape<32, 10>(), SlabShape<32, 12>(), SlabShape<32, 16>());
    }
  } else {
    choose(SlabShape<4, 9>(), SlabShape<4, 12>(), SlabShape<4, 16>(), SlabShape<8, 9>(), SlabShape<8, 12>(),
           SlabShape<8, 16>(), SlabShape<16, 9>(), SlabShape<16, 12>(), SlabShape<16, 16>(), SlabShape<32, 9>(),
           SlabShape<32, 12>(), SlabShape<32, 16>());
  }
  choose(SlabShape<1, 4, true>(), SlabShape<1, 16, true>(), SlabShape<4, 16, true>(), SlabShape<16, 16, true>(),
         SlabShape<32, 16, true>());
  return status;
}

template <class A, bool kSeparate, Lines kLines>
cudaError_t enqueue_tile_passes(CudaPlan plan, const TileArgs<A>& tile, void* scratch, cudaStream_t stream) {
  using States = State<typename A::C>;
  States* const states = static_cast<States*>(scratch);
  TilePassArgs<A> args{
      tile, states, plan.tile.cluster, Divisor(plan.tile.tiles), Strided(plan.tile.sets), Divisor(plan.tile.set_pieces),
      false};
  cudaError_t status = enqueue(tile_pass<A, kSeparate, kLines>, plan, stream, args);
  if (status != cudaSuccess) return status;
  status =
      enqueue_combine<A>(states, plan.tile.cluster, plan.tile.columns, plan.tile.tiles * plan.tile.columns, stream);
  if (status != cudaSuccess) return status;
  // What is finished by a block is what a stage has room for: the nearer together, the faster.
  args.finish = true;
  args.tile.tile.block_lines = plan.tile.groups * (kTilePassPacks / A::kInputs);
  const int64_t set_pieces = (plan.tile.all_lines - 1) / args.tile.tile.block_lines + 1;
  args.set_pieces = Divisor(set_pieces);
  plan.blocks = plan.tile.tiles * plan.tile.sets.elements() * set_pieces;
  return enqueue(tile_pass<A, kSeparate, kLines>, plan, stream, Mode::kOverlapping, args);
}

template <class A, bool kSeparate, Lines kLines>
cudaError_t enqueue_tile_of(const CudaPlan& plan, const TileArgs<A>& tile, void* scratch, cudaStream_t stream) {
  if (plan.schedule == Schedule::kTile) return enqueue(rows_in_tile<A, kSeparate, kLines>, plan, stream, tile);
  return enqueue_tile_passes<A, kSeparate, kLines>(plan, tile, scratch, stream);
}

template <class A>
cudaError_t enqueue_tile(const CudaPlan& plan, const A& access, void* scratch, cudaStream_t stream) {
  const Tile& tile = plan.tile;
  int64_t reach = 0;
  for (int i = 0; i < tile.lines.size; ++i) reach += (tile.lines.dim[i].extent - 1) * tile.lines.dim[i].stride;
  const TileArgs<A> args{access,
                         tile,
                         Strided(tile.kept),
                         Strided(tile.lines),
                         Stride(tile.lines, tile.groups, tile.turn > 0),
                         Divisor(tile.cluster),
                         Divisor(tile.packs),
                         Divisor(tile.groups),
                         Divisor(tile.unit),
                         Divisor(tile.segment_packs),
                         Divisor(tile.segment_tiles),
                         Divisor(tile.inner),
                         Divisor(tile.group),
                         Divisor(tile.positions / tile.columns),
                         log2_of(tile.team),
                         log2_of(tile.shuffled),
                         log2_of(tile.positions / tile.columns),
                         log2_of(A::kWidth) - log2_of(tile.turn),
                         reach};
  if (tile.spanning) {
    return tile.separate ? enqueue_tile_of<A, true, Lines::kSpanning>(plan, args, scratch, stream)
                         : enqueue_tile_of<A, false, Lines::kSpanning>(plan, args, scratch, stream);
  }
  if (!tile.run) return enqueue_tile_of<A, true, Lines::kPart>(plan, args, scratch, stream);
  return tile.separate ? enqueue_tile_of<A, true, Lines::kRuns>(plan, args, scratch, stream)
                       : enqueue_tile_of<A, false, Lines::kRuns>(plan, args, scratch, stream);
}

template <class A>
cudaError_t enqueue_strips(const CudaPlan& plan, const A& access, cudaStream_t stream) {
  const Tile& tile = plan.tile;
  const StripArgs<A> args{access,
                          tile,
                          Strided(tile.kept),
                          Strided(tile.lines),
                          Strided(tile.in_unit),
                          Strided(tile.in_line),
                          Divisor(tile.packs),
                          Divisor(tile.segment_tiles),
                          Divisor(tile.inner),
                          Divisor(tile.columns),
                          log2_of(tile.team)};
  cudaError_t status = cudaErrorInvalidValue;
  const auto try_held = [&](auto held) {
    constexpr int kHeld = decltype(held)::value;
    if (plan.packs == kHeld) status = enqueue(rows_in_strips<A, kHeld>, plan, stream, args);
  };
  const auto choose = [&](auto... held) { (try_held(held), ...); };
  choose(std::integral_constant<int, 4>(), std::integral_constant<int, 8>(), std::integral_constant<int, 16>(),
         std::integral_constant<int, 24>());
  if constexpr (sizeof(typename A::T) == 2 && A::kInputs == 1) choose(std::integral_constant<int, 32>());
  return status;
}

// Schedules for rows that are runs of memory, or a few interleaved ones.
template <class A>
cudaError_t launch_rows(const CudaPlan& plan, const View& view, const A& access, uint64_t* words, cudaStream_t stream) {
  const RowArgs<A> rows{
      access, view.kept, view.rows, view.columns, view.reduced.dim[view.reduced.size - 1].mask_stride, plan.boundary};
  switch (plan.schedule) {
    case Schedule::kPacks:
      return enqueue_packs(plan, rows, stream);
    case Schedule::kSlab:
      return enqueue_slab<A>(plan, rows, stream);
    case Schedule::kLanes:
      return enqueue_any_lanes(LanesAndPacks(), plan, rows, stream);
    case Schedule::kBlock:
      return enqueue_block(plan, rows, stream);
    case Schedule::kChunks:
    case Schedule::kRing:
      return enqueue_chunks(plan, rows, words, stream);
    case Schedule::kPasses:
      return enqueue_passes(plan, rows, words, stream);
    case Schedule::kStream:
      return enqueue(rows_read_twice<A>, plan, stream, rows);
    default:
      return cudaErrorInvalidValue;
  }
}

// And for others.
template <class A>
cudaError_t launch_view(const CudaPlan& plan, const View& view, const A& access, void* scratch, cudaStream_t stream) {
  const ViewArgs<A> any{access, view};
  switch (plan.schedule) {
    case Schedule::kTile:
    case Schedule::kTilePasses:
      return enqueue_tile(plan, access, scratch, stream);
    case Schedule::kStrips:
      return enqueue_strips(plan, access, stream);
    case Schedule::kGather:
      return enqueue(gathered_rows<A>, plan, stream, any);
    case Schedule::kColumns:
      return enqueue(columns_side_by_side<A>, plan, stream, any);
    default:
      return cudaErrorInvalidValue;
  }
}

constexpr bool is_of_rows(Schedule schedule) {
  return schedule != Schedule::kTile && schedule != Schedule::kTilePasses && schedule != Schedule::kStrips &&
         schedule != Schedule::kGather && schedule != Schedule::kColumns;
}

template <template <class> class OpOf, class T, bool kMasked>
cudaError_t launch_masked(const CudaPlan& plan, const View& view, const Operands& operands, cudaStream_t stream) {
  const auto fill = [&](auto access) {
    for (int k = 0; k < access.kInputs; ++k) access.in[k] = static_cast<const T*>(operands.in[k]);
    access.mask = operands.mask;
    access.out = static_cast<T*>(operands.out);
    access.elements = view.rows * view.columns;
    return access;
  };
  if (is_of_rows(plan.schedule)) {
    const auto access = fill(Access<OpOf<typename RowPolicy<OpOf, T>::type>, T, kMasked>());
    return launch_rows(plan, view, access, static_cast<uint64_t*>(operands.scratch), stream);
  }
  const auto access = fill(Access<OpOf<typename Policy<T>::type>, T, kMasked>());
  return launch_view(plan, view, access, operands.scratch, stream);
}

template <DType dtype>
struct Storage;
template <>
struct Storage<DType::kF16> {
  using type = __half;
};
template <>
struct Storage<DType::kBF16> {
  using type = __nv_bfloat16;
};
template <>
struct Storage<DType::kF32> {
  using type = float;
};
template <>
struct Storage<DType::kF64> {
  using type = double;
};

template <Op op, DType dtype>
cudaError_t launch_plan(const CudaPlan& plan, const View& view, const Operands& operands, cudaStream_t stream) {
  using T = typename Storage<dtype>::type;
  const auto launch = [&](auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    if constexpr (op == Op::kSoftmax) {
      return launch_masked<Softmax, T, kMasked>(plan, view, operands, stream);
    } else if constexpr (op == Op::kLogSoftmax) {
      return launch_masked<LogSoftmax, T, kMasked>(plan, view, operands, stream);
    } else if constexpr (op == Op::kSoftmaxLinear) {
      return launch_masked<SoftmaxLinear, T, kMasked>(plan, view, operands, stream);
    } else if constexpr (op == Op::kLogSoftmaxJvp) {
      return launch_masked<LogSoftmaxJvp, T, kMasked>(plan, view, operands, stream);
    } else {
      return launch_masked<LogSoftmaxVjp, T, kMasked>(plan, view, operands, stream);
    }
  };
  return view.masked ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace jax_softmax::cuda
