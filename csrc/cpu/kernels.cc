// The CPU kernels, compiled once for each instruction set: `work` and `run` in a namespace of its name.
#include "cpu/arithmetic.h"
#include "cpu/tiles.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

template <template <class> class OpOf, class T, class Out = T>
BlockFunctions<T> functions_of(bool masked) {
  return masked ? OperatorOnBlocks<OpOf, T, Out, true>::functions()
                : OperatorOnBlocks<OpOf, T, Out, false>::functions();
}

template <class T>
BlockFunctions<T> functions_of(Op op, DType out, bool masked) {
  if constexpr (sizeof(T) < 8) {
    if (op == Op::kAbsmaxScale && out == DType::kI8) return functions_of<AbsmaxScale, T, Int8>(masked);
  }
#define JAX_SOFTMAX_CASE(name, type, logarithms, on_cpu)         \
  if constexpr (on_cpu) {                                        \
    if (op == Op::k##type) return functions_of<type, T>(masked); \
  }
  JAX_SOFTMAX_OPERATORS(JAX_SOFTMAX_CASE)
#undef JAX_SOFTMAX_CASE
  __builtin_unreachable();
}

template <class T>
Work work_of(const TiledView<T>& tiles, const View& view, int64_t threads) {
  constexpr int64_t kFewTiles = 4;  // for each thread: with as many, rows need not be cut
  const int64_t parts = ceil_div(view.columns, tiles.part_length());
  if (parts == 1 || tiles.tiles() >= kFewTiles * threads) return {tiles.tiles(), 0};
  const int64_t units = tiles.tiles() * parts;
  return {units, units * tiles.most_states() * static_cast<int64_t>(sizeof(States<T>))};
}

// Long rows are cut into parts. If there are few tiles, a unit is one part: its first phase writes the part's states to
// scratch memory, its second combines those of all parts. Else a unit is a tile with all parts. Either way the order of
// a row's sums depends on its length alone.
template <class T>
void run_tiles(TiledView<T>& tiles, const BlockFunctions<T>& op, const View& view, void* scratch, bool second_phase,
               int64_t first_unit, int64_t last_unit) {
  const int64_t length = tiles.part_length(), parts = ceil_div(view.columns, length);
  const auto end_of = [&](int64_t part) { return std::min(view.columns, (part + 1) * length); };
  States<T> states[kMostVectors], part_states[kMostVectors];
  const auto finish = [&](int64_t begin, int64_t end) {
    if (op.take_numbers) tiles.take_numbers(states);
    if (op.along.finish) tiles.finish(begin, end, states);
    if (op.finish_labels) tiles.finish_labels(begin, end, states);
  };
  if (!scratch) {
    for (int64_t tile = first_unit; tile < last_unit; ++tile) {
      tiles.seek(tile);
      if (parts == 1) {
        tiles.accumulate(0, view.columns, states);
      } else {
        op.identity(states, tiles.states());
        for (int64_t part = 0; part < parts; ++part) {
          tiles.accumulate(part * length, end_of(part), part_states);
          op.combine(states, part_states, tiles.states());
        }
      }
      if (op.row_results) tiles.store_rows(states);
      finish(0, view.columns);
    }
    return;
  }
  const auto unit_states = [&](int64_t unit) { return static_cast<States<T>*>(scratch) + unit * tiles.most_states(); };
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    const int64_t tile = unit / parts, part = unit % parts;
    tiles.seek(tile);
    if (!second_phase) {
      tiles.accumulate(part * length, end_of(part), unit_states(unit));
      continue;
    }
    op.identity(states, tiles.states());
    for (int64_t i = tile * parts; i < (tile + 1) * parts; ++i) op.combine(states, unit_states(i), tiles.states());
    if (op.row_results && part == 0) tiles.store_rows(states);
    finish(part * length, end_of(part));
  }
}

// Calls body(tiles, functions) for the storage types.
template <class Body>
auto with_tiles(Op op, DType in, DType out, const View& view, const Buffers& buffers, Body body) {
  const auto with = [&](auto zero) {
    using T = decltype(zero);
    const BlockFunctions<T> functions = functions_of<T>(op, out, buffers.mask);
    TiledView<T> tiles(view, buffers, functions);
    return body(tiles, functions);
  };
  switch (in) {
    case DType::kF16:
      return with(Half());
    case DType::kBF16:
      return with(BFloat16());
    case DType::kF32:
      return with(float());
    case DType::kF64:
      return with(double());
    default:
      __builtin_unreachable();
  }
}

}  // namespace

Work work(Op op, DType in, DType out, const View& view, const Buffers& buffers, int64_t threads) {
  return with_tiles(op, in, out, view, buffers, [&](auto& tiles, auto&) { return work_of(tiles, view, threads); });
}

void run(Op op, DType in, DType out, const View& view, const Buffers& buffers, void* scratch, bool second_phase,
         int64_t first_unit, int64_t last_unit) {
  with_tiles(op, in, out, view, buffers, [&](auto& tiles, auto& functions) {
    run_tiles(tiles, functions, view, scratch, second_phase, first_unit, last_unit);
  });
}

}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
