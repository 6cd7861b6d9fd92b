// How the schedules share out their tiles, and what they hold of them.
#pragma once

#include <algorithm>

#include "cpu/access.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

constexpr int kUnroll = 8;                 // elements of a lane whose maximum is taken before the sum is rescaled
constexpr int64_t kHeldBytes = 512 << 10;  // what is held between the passes, in the second cache

// Runs a schedule S, which sees the view as tiles, each of one or more rows side by side in up to kVectors vectors.
// Where there are few tiles, their rows are cut into parts that different threads take: they first leave their states
// in the scratch memory, then put them together. Where there are many, a thread does the same with all parts of a tile.
// So how a row is summed up depends on its length alone.
template <class S>
struct Parts {
  using M = typename S::M;
  using Op = typename S::Op;
  using C = typename M::Value;
  static constexpr int64_t kFewTiles = 4;  // for each thread
  static constexpr int64_t kMostParts = 256;

  static int64_t part_length(const View& view) {
    if (S::holds(view)) return view.columns;
    const int64_t least = ceil_div(view.columns, kMostParts), unit = S::part_unit(view);
    return ceil_div(least, unit) * unit;
  }

  static Work work(const View& view, int64_t threads) {
    const S schedule(view, Operands{}, threads);
    const int64_t tiles = schedule.tiles(), parts = ceil_div(view.columns, part_length(view));
    if (parts == 1 || tiles >= kFewTiles * threads) return {threads, tiles, 0};
    return {threads, tiles * parts, tiles * parts * schedule.most_vectors() * static_cast<int64_t>(sizeof(State<C>))};
  }

  static void run(const View& view, const Operands& operands, const Work& work, void* scratch, bool second_phase,
                  int64_t first_unit, int64_t last_unit) {
    S schedule(view, operands, work.threads);
    const int64_t length = part_length(view), parts = ceil_div(view.columns, length);
    const auto end_of = [&](int64_t part) { return part + 1 < parts ? (part + 1) * length : view.columns; };
    for (int64_t unit = first_unit; unit < last_unit; ++unit) {
      const int64_t tile = scratch ? unit / parts : unit, part = unit - tile * parts;
      scratch ? schedule.seek(tile, part * length, end_of(part)) : schedule.seek(tile, 0, view.columns);
      if constexpr (S::kHolds) {
        if (S::holds(view)) {
          schedule.run_held();
          continue;
        }
      }
      const int vectors = schedule.vectors();
      State<C> state[S::kVectors];
      for (int t = 0; t < vectors; ++t) state[t] = identity<Op, M>();
      const auto accumulate_part = [&](int64_t part, State<C>* states) {
        for (int t = 0; t < vectors; ++t) states[t] = identity<Op, M>();
        schedule.accumulate(part * length, end_of(part), states);
      };
      const auto add = [&](const State<C>* states) {
        for (int t = 0; t < vectors; ++t) state[t] = combine<Op, M>(state[t], states[t]);
      };
      if (!scratch) {
        State<C> states[S::kVectors];
        for (int64_t part = 0; part < parts; ++part) {
          accumulate_part(part, parts == 1 ? state : states);
          if (parts > 1) add(states);
        }
        schedule.finish(0, view.columns, state);
        continue;
      }
      const int64_t stride = schedule.most_vectors();
      State<C>* const kept = static_cast<State<C>*>(scratch);
      if (!second_phase) {
        accumulate_part(part, kept + unit * stride);
      } else {
        for (int64_t i = unit - part; i < unit - part + parts; ++i) add(kept + i * stride);
        schedule.finish(part * length, end_of(part), state);
      }
    }
  }
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
