#include "plan_tile.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

#include "tile_shape.h"

namespace jax_softmax {
namespace {

// The last results of a function of integers, which several threads may ask for.
template <class Result>
class Kept {
 public:
  template <class Function>
  Result get(const std::vector<int64_t>& key, Function function) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = results_.find(key);
      if (found != results_.end()) return found->second;
    }
    const Result result = function();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (results_.size() == kMost) results_.clear();
    results_.emplace(key, result);
    return result;
  }

 private:
  static constexpr size_t kMost = 1000;
  std::mutex mutex_;
  std::map<std::vector<int64_t>, Result> results_;
};

Dims without_last(Dims dims) {
  --dims.size;
  return dims;
}

// Bytes of a block's tile, and packs of a line in it at the least.
constexpr int kTileBytes = 64 << 10;
constexpr int kTileLinePacks = 4;
// A block with more has a multiprocessor for itself.
constexpr int kLonelyTileBytes = 112 << 10;
// Lanes that have neighbouring packs of a run add up first, if there are a multiple of so many; if not, a tile takes
// longer. Where runs begin anywhere in a pack, those at their edges take longer: wide tiles have them in most warps.
constexpr int kPacksAddedUp = 8;
constexpr double kAddedUpAlone = 0.94;
constexpr int kMostRaggedPacks = 32;
// Arrays whose rows are in strips of them: bytes of all operands at the most. Aligned runs of so many units are better.
constexpr int kSmallArrayBytes = 16 << 10;
constexpr int kLongRunUnits = 4;
constexpr int kFewArrayColumns = 32;  // but not of so few columns a row,
constexpr int kFewRunColumns = 64;    // and if arrays are runs, those of more columns are better ones
// Runs of one operand in no more whole lines than this go in strips, like ragged ones.
constexpr int kFewLines = 4;
// Of ragged runs of which several are side by side, a shape is looked for if there are more lines of them than this, or
// if the runs are not so short, but have so few elements, at least as many.
constexpr int kFewShortRuns = 8;
constexpr int kRaggedRun = 64;
// Of runs that begin anywhere in a pack, at the least, that sets have.
constexpr int64_t kSetRunBytes = 512;
// Lines that are enough for a set, and how many more it may have for whole turns of them.
constexpr int kManyLines = 1024;
constexpr double kMostWholeTurns = 1.125;

// Finds the lines that a tile has of a view, and their shape.
class TileChooser {
 public:
  // For a tile that holds rows, so that they are read once, or with `passes` one that does not. With `scratch` memory,
  // none that takes longer than reading twice.
  TileChooser(const View& view, int bytes, int inputs, const Device& device, bool passes, bool scratch)
      : view_(view), bytes_(bytes), inputs_(inputs), device_(device), passes_(passes), scratch_(scratch) {}

  // False if there is none.
  bool choose(CudaPlan* plan) {
    plan_ = plan;
    return view_.minor_reduced ? minor_reduced() : minor_kept();
  }

 private:
  struct Shape {
    int64_t packs, groups;
  };

  bool whole_strides(const Dims& dims, int n) const {
    return std::all_of(dims.dim, dims.dim + n, [&](const Dim& dim) { return dim.stride % width_ == 0; });
  }
  bool whole_strides(const Dims& dims) const { return whole_strides(dims, dims.size); }

  bool shape_fits(const Tile& tile, Shape shape, int64_t held, int most_blocks) {
    return tile.lines.elements() <= kMostTileNumbers &&
           lay_out(plan_, tile, static_cast<int>(shape.packs), static_cast<int>(shape.groups), static_cast<int>(held),
                   bytes_, inputs_, most_threads_, device_, std::min(most_blocks, device_.largest_cluster), passes_);
  }
  // Tries numbers of lines a thread, the one that lets most blocks run at once first, and cluster sizes, until a tile
  // of the shape that shape_of(lines a thread) says fits.
  template <class ShapeOf>
  bool try_all(const Tile& tile, int64_t first_held, ShapeOf shape_of) {
    const auto fits = [&](int64_t held, int most_blocks) {
      return shape_fits(tile, shape_of(held), held, most_blocks);
    };
    // A little more, where that lets fewer blocks wait for one another and entries take no room.
    const int64_t more_held = tile.separate ? first_held : 9 * most_held_ / 8;
    for (const int most_blocks : {8, device_.largest_cluster}) {
      if (fits(first_held, most_blocks) || fits(more_held, most_blocks)) return true;
    }
    for (const int64_t held :
         {most_held_, 5 * most_held_ / 4, 3 * most_held_ / 2, 2 * most_held_, 13 * most_held_ / 4, fewer_held_}) {
      if (fits(held, 8) || fits(held, device_.largest_cluster)) return true;
    }
    return false;
  }
  // Of as many threads as possible, at least so many packs wide, a multiple of `unit`, and in at least so many groups.
  bool try_shapes(const Tile& tile, int unit, int least_packs, int64_t least_groups) {
    const int64_t lines = tile.lines.elements();
    // A thread that has all lines of its rows need not ask others.
    if (!passes_ && tile.spanning && lines <= 2 * most_held_ && 2 * least_packs <= most_threads_ &&
        shape_fits(tile, {most_threads_ / 2 / unit * unit, 1}, 2 * most_held_, 1)) {
      return true;
    }
    return try_all(tile, tile.spanning || tile.inner == 1 ? most_held_ : fewer_held_, [&](int64_t held) {
      int64_t groups = 1;  // as many as it takes to hold all lines
      while (groups * held < lines && 2 * groups * least_packs <= most_threads_) groups *= 2;
      groups = std::max(groups, least_groups);
      return Shape{most_threads_ / groups / unit * unit, groups};
    });
  }
  // How many groups it takes for a thread's lines to begin alike in a pack.
  int64_t alike(const Dims& lines) const {
    return std::min<int64_t>(turn_of(width_, lines.dim[lines.size - 1].stride), lines.elements());
  }
  // Packs that cover so many elements, wherever in a pack they begin unless `aligned`.
  int64_t packs_of(int64_t elements, bool aligned) const {
    return ceil_div(aligned ? elements : elements + width_ - 1, width_);
  }

  // Packs that are whole lines of `period` elements.
  int64_t unit_of(int64_t period) const { return std::lcm<int64_t>(period, width_) / width_; }
  bool are_runs(const Dim& along, int64_t period) const {
    return along.stride == period && unit_of(period) <= most_threads_ / 2 && along.extent <= kMostTileNumbers / period;
  }
  // Runs of such lines, `group` elements of each row side by side.
  bool try_runs(Tile tile, int64_t period, int64_t group, int64_t inner_mask) {
    Dim& along = tile.lines.dim[tile.lines.size - 1];
    if (!are_runs(along, period) || !whole_strides(tile.lines, tile.lines.size - 1)) return false;
    const int64_t unit = unit_of(period);
    tile.separate = true;
    tile.inner = period;
    tile.group = group;
    tile.outer_mask = along.mask_stride;
    tile.inner_mask = inner_mask;
    tile.run = along.extent * period;
    tile.segment = unit * width_;
    const bool aligned = tile.run % width_ == 0 && whole_strides(tile.kept) && whole_strides(tile.sets);
    along = Dim{ceil_div(packs_of(tile.run, aligned), unit), tile.segment, 0};
    if (!passes_ && choose_interleaved(plan_, tile, static_cast<int>(unit), bytes_, inputs_, device_)) return true;
    return try_all(tile, fewer_held_, [&](int64_t held) {
      return Shape{unit, std::min<int64_t>(most_threads_ / unit, ceil_div(tile.lines.elements(), held))};
    });
  }
  // Lines of several dimensions, cut into sets, where states take less room than what they are of.
  bool has_sets(const Dims& lines) const {
    return lines.size > 1 && lines.dim[lines.size - 1].extent * bytes_ >= 2 * state_bytes(bytes_);
  }
  bool has_sets_of_runs(const Tile& tile) const {
    return tile.lines.size > 1 && in_sets(tile, true).lines.elements() * bytes_ >= 2 * state_bytes(bytes_);
  }
  // Of the outer dimension that leaves fewest sets, indices a turn apart share one, since their lines begin alike. If
  // the innermost dimension's are not one run, of which any part will do, they are made whole turns for that, unless
  // they, or their operands, are many already.
  Tile in_sets(Tile tile, bool of_runs) const {
    const Dims outer = without_last(tile.lines);
    Dim last = tile.lines.dim[tile.lines.size - 1];
    const auto turn = [&](const Dim& dim) { return turn_of(width_, dim.stride); };
    const auto turns = [&](const Dim& dim) { return ceil_div(dim.extent, turn(dim)); };
    int shared = 0;
    for (int i = 1; i < outer.size; ++i) {
      if (turns(outer.dim[i]) > turns(outer.dim[shared])) shared = i;
    }
    const Dim& dim = outer.dim[shared];
    const int64_t apart = turn(dim), rest = dim.extent % apart,
                  whole = of_runs ? last.extent : turns(last) * turn(last);
    const bool many = inputs_ == 2 || last.extent > kManyLines || whole > kMostWholeTurns * last.extent;
    if (turns(dim) == 1 || (!of_runs && many)) {
      tile.sets = outer;
      tile.full_sets = static_cast<int>(outer.elements());
      tile.lines = Dims{1, {last}};
      return tile;
    }
    tile.sets = Dims{1, {{apart, dim.stride, dim.mask_stride}}};
    for (int i = 0; i < outer.size; ++i) {
      if (i != shared) tile.sets.dim[tile.sets.size++] = outer.dim[i];
    }
    const int64_t sets = tile.sets.elements();
    tile.full_sets = static_cast<int>(rest == 0 ? sets : sets / apart * rest);
    tile.last_lines = static_cast<int>(last.extent);
    last.extent = whole;
    tile.lines = Dims{2, {{turns(dim), apart * dim.stride, apart * dim.mask_stride}, last}};
    return tile;
  }
  // Whether lines of few bytes had better be read twice, in whole runs, than once, one by one.
  bool better_twice(const Tile& tile, int64_t period, int64_t line_bytes) const {
    const Dims& lines = tile.lines;
    const Dim& along = lines.dim[lines.size - 1];
    return scratch_ && !passes_ && line_bytes < kStripSegmentBytes && are_runs(along, period) &&
           along.extent * period * bytes_ >= kSetRunBytes &&
           (whole_strides(lines, lines.size - 1) || has_sets_of_runs(tile));
  }

  // Strips of lines of which each row has `inner` elements, which lie as `in_line` says.
  bool strips(Tile tile, const Dims& in_line) {
    tile.in_line = in_line;
    tile.unit = static_cast<int>(tile.inner);
    tile.columns = 1;
    return !passes_ && choose_strips(plan_, tile, bytes_, inputs_, device_);
  }
  // Strips of small arrays, each of which has all of its rows. Of a single array as of many, lest a row's bits depend
  // on how many there are.
  bool small_arrays() {
    const Dim& outermost = view_.reduced.dim[0];
    const int64_t size = outermost.extent * outermost.stride;
    if (passes_ || size * bytes_ * inputs_ > kSmallArrayBytes) return false;
    Tile tile{};
    Dim arrays{1, size, 0};
    for (int i = 0; i < view_.kept.size; ++i) {
      const Dim& dim = view_.kept.dim[i];
      if (dim.stride == size) {
        arrays = dim;
      } else {
        Dims& to = dim.stride > size ? tile.kept : tile.in_unit;
        to.dim[to.size++] = dim;
      }
    }
    tile.in_line = view_.reduced;
    tile.inner = view_.columns;
    tile.unit = static_cast<int>(size);
    tile.columns = static_cast<int>(tile.in_unit.elements());
    tile.segment = arrays.extent * size;
    tile.outer_mask = arrays.mask_stride;
    return choose_strips(plan_, tile, bytes_, inputs_, device_);
  }
  // Whether lines of whole packs are better runs than small arrays.
  bool long_runs(const Dims& lines, int64_t period) const {
    const Dim& along = lines.dim[lines.size - 1];
    return view_.columns > kFewArrayColumns && are_runs(along, period) && whole_strides(lines, lines.size - 1) &&
           along.extent * period % width_ == 0 && along.extent * period >= kLongRunUnits * unit_of(period) * width_;
  }

  bool minor_reduced() {
    Tile tile{};
    tile.inner = tile.group = 1;
    tile.kept = without_last(view_.kept);
    tile.lines = without_last(view_.reduced);
    const bool neighbours = view_.kept.size && kept_.stride == run_.extent;
    if (neighbours && run_.extent <= most_threads_ * width_ && kept_.extent <= kMostTileNumbers / run_.extent) {
      tile.segment = kept_.extent * run_.extent;
      tile.inner = run_.extent;
      tile.outer_mask = kept_.mask_stride;
      tile.inner_mask = run_.mask_stride;
      tile.spanning = tile.segment % width_ == 0 && whole_strides(tile.lines) && whole_strides(tile.kept);
      tile.separate = !tile.spanning || run_.extent % width_ != 0;
      const bool arrays = !tile.spanning && !(tile.lines.size > 0 && long_runs(tile.lines, tile.segment));
      if (arrays && small_arrays()) return true;
      const std::optional<bool> found = tile.spanning ? runs_in_whole_packs(tile) : runs_anywhere(tile);
      if (found) return *found;
    } else if (small_arrays()) {
      return true;
    }
    return rows_alone(tile);
  }

  // Rows whose runs are side by side in lines of whole packs, as a tile; nothing if they had better be held one by one.
  std::optional<bool> runs_in_whole_packs(const Tile& tile) {
    // Threads have one pack of each line, which is too little if there are so few.
    const bool few = inputs_ == 1 && run_.extent % width_ != 0 && tile.lines.elements() <= kFewLines;
    if (few && strips(tile, Dims{1, {{run_.extent, 1, run_.mask_stride}}})) return true;
    const int unit = static_cast<int>(unit_of(run_.extent)), least = std::max(unit, kTileLinePacks);
    // What is read twice needs no room: wider lines, where there are any.
    const int wider = passes_ && tile.segment >= 2 * least * width_ ? 2 * least : least;
    if (least <= most_threads_ && try_shapes(tile, unit, wider, 1)) return true;
    if (scratch_ && !passes_ && run_.extent * bytes_ < kSectorBytes) return false;  // as better_twice
    return std::nullopt;
  }
  // And in lines that begin anywhere.
  std::optional<bool> runs_anywhere(const Tile& tile) {
    const int64_t lines = tile.lines.elements();
    if (tile.lines.size > 0 && kept_.mask_stride == run_.extent * run_.mask_stride) {
      const bool sets = passes_ && has_sets_of_runs(tile) && !whole_strides(tile.lines, tile.lines.size - 1);
      if (try_runs(sets ? in_sets(tile, true) : tile, tile.segment, run_.extent, run_.mask_stride)) return true;
      if (better_twice(tile, tile.segment, run_.extent * bytes_)) return false;
    }
    if (strips(tile, Dims{1, {{run_.extent, 1, run_.mask_stride}}})) return true;
    if (tile.lines.size != 1) return std::nullopt;
    // Of longer ragged runs a tile would read much at its edges for others.
    const bool is_short = packs_of(run_.extent, false) <= kTileLinePacks;
    if (!passes_ && (is_short ? lines > kFewShortRuns : run_.extent <= kRaggedRun && lines >= kRaggedRun)) {
      const int turn = static_cast<int>(turn_of(width_, tile.lines.dim[0].stride));
      if (choose_lines(plan_, tile, turn, bytes_, inputs_, device_)) return true;
    }
    if (is_short && try_shapes(tile, 1, kTileLinePacks, alike(tile.lines))) return true;
    return std::nullopt;
  }

  // A row to a block, or to a cluster.
  bool rows_alone(Tile tile) {
    tile.kept = view_.kept;
    tile.spanning = tile.separate = false;
    tile.inner = 1;
    tile.run = run_.extent;
    tile.outer_mask = run_.mask_stride;
    tile.inner_mask = 0;
    const bool aligned = run_.extent % width_ == 0 && whole_strides(view_.kept) && whole_strides(tile.lines);
    const int64_t run_packs = packs_of(run_.extent, aligned);
    int64_t best = 1;
    double best_use = 0;  // by how many places most threads have most to do
    const int64_t widest = std::min<int64_t>(aligned ? most_threads_ : kMostRaggedPacks,
                                             ceil_div(run_packs, kPacksAddedUp) * kPacksAddedUp);
    for (int64_t packs = widest; packs > 0; --packs) {
      const int64_t groups = most_threads_ / packs;
      double use = static_cast<double>(run_packs) / (ceil_div(run_packs, packs) * packs) * (packs * groups) /
                   (ceil_div(packs * groups, 32) * 32);
      if (packs % kPacksAddedUp != 0) use *= kAddedUpAlone;
      if (use > best_use * 1.02) best_use = use, best = packs;
    }
    tile.segment = best * width_;
    tile.lines.dim[tile.lines.size++] = Dim{ceil_div(run_packs, best), tile.segment, 0};
    if (run_.extent > kMostTileNumbers) return false;
    return try_all(tile, most_held_, [&](int64_t held) {
      return Shape{best, std::min<int64_t>(most_threads_ / best, ceil_div(tile.lines.elements(), held))};
    });
  }

  bool minor_kept() {
    Tile tile{};
    tile.inner = tile.group = 1;
    tile.kept = without_last(view_.kept);
    tile.lines = view_.reduced;
    tile.separate = true;
    tile.segment = kept_.extent;
    tile.outer_mask = kept_.mask_stride;
    if (kept_.extent > kMostTileNumbers) return false;
    // Of those that are read twice and narrow, several lines side by side are read at once.
    const bool side_by_side =
        passes_ && kept_.extent * bytes_ < 2 * kTileLinePacks * kPackBytes && are_runs(run_, kept_.extent);
    const bool whole = kept_.extent % width_ == 0 && whole_strides(tile.lines) && whole_strides(tile.kept);
    return whole && kept_.extent * bytes_ >= kSegmentBytes && !side_by_side ? lines_in_whole_packs(tile)
                                                                            : lines_anywhere(tile);
  }
  bool lines_in_whole_packs(Tile tile) {
    tile.spanning = true;
    const int64_t lines = tile.lines.elements();
    if (!passes_ && lines > 2 * most_held_ && lines <= kMostTileNumbers &&
        choose_lines(plan_, tile, 1, bytes_, inputs_, device_)) {
      return true;
    }
    const bool wide = tile.segment >= 4 * kTileLinePacks * width_;
    return try_shapes(tile, 1, (!passes_ ? 1 : wide ? 4 : 2) * kTileLinePacks, 1);
  }
  bool lines_anywhere(Tile tile) {
    const bool in_runs = tile.lines.size == 1 && are_runs(run_, kept_.extent) && view_.columns > kFewRunColumns;
    if (!in_runs && !long_runs(tile.lines, kept_.extent) && small_arrays()) return true;
    const bool whole = whole_strides(tile.lines, tile.lines.size - 1);
    const bool sets = passes_ && !whole && has_sets_of_runs(tile);
    if (try_runs(sets ? in_sets(tile, true) : tile, kept_.extent, 1, kept_.mask_stride)) return true;
    if (better_twice(tile, kept_.extent, kept_.extent * bytes_)) return false;
    if (passes_ && has_sets(tile.lines) && !(whole && are_runs(run_, kept_.extent))) tile = in_sets(tile, false);
    if (run_.extent > kMostTileNumbers) return false;
    if (strips(tile, Dims{})) return true;
    if (passes_ && tile.lines.size > 1 && tile.sets.size == 0) return false;
    const bool turns = !passes_ && tile.lines.size > 1;
    const int turn = turns ? take_turns(&tile) : static_cast<int>(turn_of(width_, run_.stride));
    if (!passes_ && choose_lines(plan_, tile, turn, bytes_, inputs_, device_)) return true;
    const bool wide = bytes_ >= 4 && tile.lines.size == 1;  // of 16 bits too few threads would be left for the lines
    return try_shapes(tile, 1, packs_of_part(tile, !passes_ ? 8 : wide ? 32 : 16, bytes_), alike(tile.lines));
  }

  // Puts the dimension whose lines take turns last: of those that shift beginnings most, since others cannot make up
  // for it, the one whose whole turns have least room to spare. Returns how many lines a turn has.
  int take_turns(Tile* tile) const {
    Dims& lines = tile->lines;
    const auto turn = [&](const Dim& dim) { return turn_of(width_, dim.stride); };
    const auto whole = [&](const Dim& dim) { return ceil_div(dim.extent, turn(dim)) * turn(dim); };
    Dim& last = lines.dim[lines.size - 1];  // outer strides are multiples of its own
    for (int i = lines.size - 2; i >= 0; --i) {
      Dim& other = lines.dim[i];
      if (turn(other) == turn(last) && whole(other) * last.extent < whole(last) * other.extent) std::swap(other, last);
    }
    tile->turn = static_cast<int>(turn(last));
    tile->last_lines = static_cast<int>(last.extent);
    last.extent = whole(last);
    return tile->turn;
  }

  const View& view_;
  const int bytes_, inputs_;
  const Device& device_;
  const bool passes_, scratch_;
  const int width_ = kPackBytes / bytes_, most_threads_ = passes_ ? kTilePassThreads : kTileThreads;
  const int64_t most_held_ = kTileBytes / kPackBytes / most_threads_ / inputs_;
  const int64_t fewer_held_ = most_held_ * 3 / 4;  // where entries take more room, so that as many blocks fit
  const Dim run_ = view_.reduced.dim[view_.reduced.size - 1];
  const Dim kept_ = view_.kept.size ? view_.kept.dim[view_.kept.size - 1] : Dim{1, 1, 0};
  CudaPlan* plan_ = nullptr;
};

// Whether a tile on a chip with clusters takes longer than reading it twice would: its block has a multiprocessor for
// itself and nothing to do while it waits. Parts of runs of interleaved rows wait less, unless for many blocks.
bool waits(const CudaPlan& plan, int bytes) {
  const bool alone = plan.shared_bytes > kLonelyTileBytes;
  if (!plan.tile.run || !plan.tile.separate) return alone;
  return alone ? plan.cluster >= kMostBlocks / 2 : plan.cluster == kMostBlocks && bytes < 8;
}

// All that a tile is chosen by, but for the device.
std::vector<int64_t> key_of(const View& view, int bytes, int inputs) {
  std::vector<int64_t> key{bytes, inputs, view.minor_reduced, view.kept.size, view.reduced.size};
  for (const Dims* dims : {&view.kept, &view.reduced}) {
    for (int i = 0; i < dims->size; ++i) {
      key.insert(key.end(), {dims->dim[i].extent, dims->dim[i].stride, dims->dim[i].mask_stride});
    }
  }
  return key;
}

}  // namespace

// Choosing takes up to some ten microseconds, as long as a small call itself: what was chosen is kept.
bool plan_tile(CudaPlan* plan, const View& view, int bytes, int inputs, const Device& device, bool scratch) {
  struct Result {
    bool fits;
    CudaPlan plan;
  };
  static auto& kept = *new Kept<Result>;  // never destroyed: threads may outlive static objects
  std::vector<int64_t> key = key_of(view, bytes, inputs);
  key.insert(key.end(), {scratch, device.compute_capability, device.multiprocessors, device.shared_memory_per_block,
                         device.largest_cluster});
  const Result result = kept.get(key, [&] {
    CudaPlan once{}, twice{};  // as often as rows are read
    once.cluster = twice.cluster = 1;
    const bool fits = TileChooser(view, bytes, inputs, device, false, scratch).choose(&once);
    const bool lonely = fits && device.largest_cluster > 1 && waits(once, bytes);
    if (scratch && (!fits || lonely) && TileChooser(view, bytes, inputs, device, true, true).choose(&twice)) {
      return Result{true, twice};
    }
    return Result{fits || TileChooser(view, bytes, inputs, device, false, false).choose(&once), once};
  });
  if (result.fits) *plan = result.plan;
  return result.fits;
}

int64_t tile_scratch_bytes(const View& view, int bytes, int inputs) {
  static auto& kept = *new Kept<int64_t>;
  return kept.get(key_of(view, bytes, inputs), [&]() -> int64_t {
    CudaPlan plan{};
    if (TileChooser(view, bytes, inputs, kSmallestDevice, false, true).choose(&plan)) return 0;
    if (!TileChooser(view, bytes, inputs, kSmallestDevice, true, true).choose(&plan)) return 0;
    return plan.tile.tiles * plan.tile.cluster * plan.tile.columns * state_bytes(bytes);
  });
}

}  // namespace jax_softmax
