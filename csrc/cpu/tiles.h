// How a view is cut into tiles, which are what threads take turns at, and how a tile's elements get into blocks.
#pragma once

#include <algorithm>
#include <memory>

#include "cpu/block.h"
#include "cpu/cpu.h"
#include "cpu/memory.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

struct Offset {
  int64_t element;
  int64_t mask;
};
Offset operator+(Offset a, Offset b) { return {a.element + b.element, a.mask + b.mask}; }
Offset operator*(int64_t n, const Dim& dim) { return {n * dim.stride, n * dim.mask_stride}; }

// Calls body(offset, first, n) for the indices [begin, end) of some dimensions, n at a time that differ in the
// innermost one alone; `first` is counted from `begin`.
template <class Body>
void for_segments(const Dims& dims, int64_t begin, int64_t end, Body body) {
  if (dims.size == 0) return body(Offset{0, 0}, 0, 1);
  const Dim& innermost = dims.dim[dims.size - 1];
  for (int64_t i = begin; i < end;) {
    const int64_t here = i % innermost.extent, n = std::min(end - i, innermost.extent - here);
    Offset offset = here * innermost;
    int64_t rest = i / innermost.extent;
    for (int d = dims.size - 2; d >= 0; --d) {
      offset = offset + rest % dims.dim[d].extent * dims.dim[d];
      rest /= dims.dim[d].extent;
    }
    body(offset, i - begin, n);
    i += n;
  }
}

constexpr int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

// Rows come in groups: the rows of the innermost kept dimension, if that is the minor one, or else one. A tile is some
// groups or a range of one group's rows. It lies in blocks in one of three ways:
//
//   along    one row after the other, with lanes along them: rows that are runs of memory or made of such
//   across   rows side by side as in memory, with lanes across them: axes other than the last
//   turned   the same, but moved there from groups that lie one after the other: short rows, and few side by side
//
// A row is summed up in blocks of a number of elements that depends on its length alone, and so do its bits. A row of
// more than a block is read twice. Of turned rows that long, blocks take the place of groups.
template <class F>
class Tiles {
 public:
  Tiles(const View& view, const Operands& operands, const Arithmetic<F>& op, const Mover<F>& mover)
      : view_(view), operands_(operands), op_(op), mover_(mover), groups_(view.kept), inner_{1, 1, 0} {
    if (!view.minor_reduced) inner_ = groups_.dim[--groups_.size];
    along_ = view.reduced.dim[view.reduced.size - 1];
    all_groups_ = view.rows / inner_.extent;
    in_place_ = mover.same && !view.masked && view.reduced.size == 1;
    if (view.minor_reduced && view.columns >= kLanes) {
      way_ = kAlong;
      block_ = op.keeps && view.columns <= kKeptAlong ? kKeptAlong : kBlockAlong;
      tile_groups_ = std::clamp<int64_t>(kTileElements / view.columns, 1, kMostVectors * kLanes);
      if (view.reduced.size > 1) tile_groups_ = std::max(tile_groups_, ceil_div(kRun, along_.extent));
    } else {
      block_ = op.keeps && view.columns <= kKeptAcross ? kKeptAcross : kBlockAcross;
      const int64_t elements = std::min(view.columns, block_);
      const int64_t most_rows = std::clamp(kHeldBytes / bytes(elements) / kRun * kRun, kRun, kMostVectors * kLanes);
      if (inner_.extent >= kLanes) {
        way_ = kAcross;
        const int64_t ranges = ceil_div(inner_.extent, most_rows);
        tile_inner_ = round_up(ceil_div(inner_.extent, ranges), kLanes);
        tile_groups_ = std::max<int64_t>(1, std::min(most_rows, kTileElements / elements) / tile_inner_);
      } else {
        way_ = kTurned;
        const int64_t groups = kTileElements / (elements * inner_.extent);
        tile_groups_ = std::clamp(groups / kLanes, int64_t{1}, kMostVectors / inner_.extent) * kLanes;
        if (view.columns > block_) {
          tile_groups_ = 1;
          batch_ = kLanes;
        }
      }
    }
    tile_groups_ = std::min(tile_groups_, all_groups_);
    if (way_ != kAcross) tile_inner_ = inner_.extent;
    ranges_ = ceil_div(inner_.extent, tile_inner_);
  }

  int64_t tiles() const { return ceil_div(all_groups_, tile_groups_) * ranges_; }
  // Vectors of states of a tile's rows, at most.
  int64_t most_states() const {
    return way_ == kAlong ? ceil_div(tile_groups_, kLanes) : batch_ > 1 ? inner_.extent : tile_rows() / kLanes;
  }
  // Elements of a row that may be somebody else's part.
  int64_t part_length() const {
    return view_.columns <= block_ ? view_.columns : round_up(ceil_div(view_.columns, kMostParts), block_ * batch_);
  }
  void seek(int64_t tile) {
    first_group_ = tile / ranges_ * tile_groups_;
    tile_groups_here_ = std::min(tile_groups_, all_groups_ - first_group_);
    first_inner_ = tile % ranges_ * tile_inner_;
    inner_here_ = std::min(tile_inner_, inner_.extent - first_inner_);
    loaded_begin_ = loaded_end_ = 0;
  }
  int64_t states() const { return way_ == kAlong ? ceil_div(tile_groups_here_, kLanes) : most_states(); }

  // Sums up elements [begin, end) of the tile's rows; `begin` is a multiple of part_length().
  void accumulate(int64_t begin, int64_t end, States<F>* states) {
    if (view_.columns <= block_) {
      load(begin, end);
      return way().accumulate(held_, op_.keeps, states);
    }
    op_.identity(states, this->states());
    States<F> later[kMostVectors];
    for (int64_t next; begin < end; begin = next) {
      next = batch_end(begin, end);
      load(begin, next);
      way().accumulate(held_, false, later);
      if (batch_ == 1) {
        op_.combine(states, later, this->states());
        continue;
      }
      for (int64_t i = 0; i < inner_.extent; ++i) {  // a block to a lane: one after the other
        for (int lane = 0; lane < ceil_div(next - begin, block_); ++lane) {
          const States<F> one{M::constant(later[i].pivot[lane]), M::constant(later[i].sum[lane])};
          op_.combine(&states[i], &one, 1);
        }
      }
    }
  }

  void finish(int64_t begin, int64_t end, const States<F>* states) {
    for (int64_t next; begin < end; begin = next) {
      next = batch_end(begin, end);
      const bool kept = op_.keeps && view_.columns <= block_;
      if (begin != loaded_begin_ || next != loaded_end_) load(begin, next);
      way().finish(held_, kept, states);
      store(begin, next);
    }
  }

 private:
  using M = Simd<F>;
  static constexpr int64_t kLanes = M::kLanes;
  static constexpr int64_t kBlockAlong = 4096,
                           kKeptAlong = 64 << 10;  // elements of a row in a block; if terms are kept
  static constexpr int64_t kBlockAcross = 512, kKeptAcross = 2048;
  static constexpr int64_t kTileElements = 4096;    // of a tile of short rows
  static constexpr int64_t kHeldBytes = 256 << 10;  // of a tile, in the second cache
  static constexpr int64_t kRun = 256 / sizeof(F);  // the fewest neighbours that are worth a tile of theirs
  static constexpr int64_t kMostParts = 256;
  enum Way { kAlong, kAcross, kTurned };

  int64_t bytes(int64_t elements) const { return elements * op_.inputs * static_cast<int64_t>(sizeof(F)); }
  const typename Arithmetic<F>::Ways& way() const { return way_ == kAlong ? op_.along : op_.across; }
  // Rows of a tile as they lie across, with those that fill up vectors.
  int64_t tile_rows() const {
    return way_ == kAcross ? tile_groups_ * round_up(tile_inner_, kLanes)
                           : round_up(batch_ > 1 ? batch_ : tile_groups_, kLanes) * inner_.extent;
  }
  // The end of what is in blocks at once, from `begin` on: whole blocks, or what is left that is none.
  int64_t batch_end(int64_t begin, int64_t end) const {
    const int64_t whole = std::min((end - begin) / block_, batch_);
    return whole > 0 ? begin + whole * block_ : end;
  }

  void load(int64_t begin, int64_t end) {
    loaded_begin_ = begin;
    loaded_end_ = end;
    const int64_t n = end - begin;
    if (way_ == kAcross) {
      held_.rows = held_.step = tile_rows();
    } else {
      held_.rows = tile_groups_here_;
      held_.step = n * inner_.extent;
    }
    held_.elements = n;
    reserve(n);
    for (int k = 0; k < op_.inputs; ++k) {
      F* const linear = buffer_.get() + k * capacity_;
      held_.in[k] = linear;
      if (in_place_ && way_ != kAcross) {
        held_.in[k] = static_cast<const F*>(operands_.in[k]) + memory_begin(begin);
      } else {
        for_pieces(begin, end, [&](Offset at, int64_t held, const Pieces& pieces) {
          const bool* const mask = operands_.mask ? operands_.mask + at.mask : nullptr;
          mover_.load(operands_.in[k], at.element, mask, op_.pad, linear + held, pieces);
        });
      }
      if (way_ == kTurned) {
        F* const turned = buffer_.get() + (op_.inputs + k) * capacity_;
        const int64_t lines = turned_lines(n), elements = tile_groups_here_ * n * inner_.extent / lines;
        held_.rows = round_up(lines, kLanes);
        transpose<kLanes>(held_.in[k], elements, turned, held_.rows, lines, elements);
        held_.in[k] = turned;
      }
    }
    if (op_.inputs == 1) held_.in[1] = held_.in[0];
    held_.out = const_cast<F*>(held_.in[0]);
    if (way_ == kAlong && in_place_) held_.out = static_cast<F*>(operands_.out) + memory_begin(begin);
    if (way_ == kTurned) {
      held_.elements = n * tile_groups_here_ / turned_lines(n);
      held_.rows *= inner_.extent;
      held_.step = held_.rows;
    }
  }

  void store(int64_t begin, int64_t end) {
    loaded_begin_ = loaded_end_ = 0;  // the results have taken the elements' place
    if (way_ == kAlong && in_place_) return;
    const F* linear = held_.out;
    if (way_ == kTurned) {
      const int64_t n = end - begin;
      const int64_t lines = turned_lines(n), elements = tile_groups_here_ * n * inner_.extent / lines;
      F* const to = in_place_ ? static_cast<F*>(operands_.out) + memory_begin(begin) : buffer_.get();
      transpose<kLanes>(held_.out, held_.rows / inner_.extent, to, elements, elements, lines);
      if (in_place_) return;
      linear = to;
    }
    for_pieces(begin, end, [&](Offset at, int64_t held, const Pieces& pieces) {
      const bool* const mask = operands_.mask ? operands_.mask + at.mask : nullptr;
      mover_.store(linear + held, mask, op_.masked, operands_.out, at.element, pieces);
    });
  }

  // Groups, or blocks, that are turned to lie side by side.
  int64_t turned_lines(int64_t n) const { return batch_ > 1 ? ceil_div(n, block_) : tile_groups_here_; }
  // Where a tile that is a run of memory begins.
  int64_t memory_begin(int64_t begin) const {
    return first_group_ * view_.columns * inner_.extent + begin * inner_.extent;
  }

  void reserve(int64_t elements) {
    const int64_t needed = way_ == kAlong ? (in_place_ ? 0 : tile_groups_ * elements)
                                          : tile_rows() * (batch_ > 1 ? std::min(elements, block_) : elements);
    if (needed <= capacity_) return;
    capacity_ = needed;
    buffer_.reset(new F[capacity_ * op_.inputs * (way_ == kTurned ? 2 : 1)]());
  }

  // Calls body(offset, held, pieces) for pieces of the tile's elements [begin, end), which lie at `held` in the buffer.
  template <class Body>
  void for_pieces(int64_t begin, int64_t end, Body body) const {
    const int64_t n = end - begin;
    if (way_ == kAcross) {
      const int64_t rows = round_up(tile_inner_, kLanes);
      for_segments(
          groups_, first_group_, first_group_ + tile_groups_here_, [&](Offset group, int64_t g, int64_t count) {
            for (int64_t i = 0; i < count; ++i) {
              const Offset base =
                  group + first_inner_ * inner_ + (groups_.size ? i * groups_.dim[groups_.size - 1] : Offset{});
              for_segments(view_.reduced, begin, end, [&](Offset at, int64_t r, int64_t elements) {
                body(base + at, r * tile_rows() + (g + i) * rows,
                     Pieces{elements, inner_here_, along_.stride, along_.mask_stride, inner_.mask_stride, tile_rows()});
              });
            }
          });
      return;
    }
    // Neighbouring elements of a group's rows follow one another, unless a mask does not.
    const bool joined = along_.stride == inner_.extent && (inner_.extent == 1 || !view_.masked ||
                                                           along_.mask_stride == inner_.extent * inner_.mask_stride);
    const Dim group = groups_.size > 0 ? groups_.dim[groups_.size - 1] : Dim{1, 0, 0};
    const int64_t mask_along = view_.minor_reduced ? along_.mask_stride : inner_.mask_stride;
    for_segments(view_.reduced, begin, end, [&](Offset element, int64_t r, int64_t elements) {
      for_segments(groups_, first_group_, first_group_ + tile_groups_here_, [&](Offset at, int64_t g, int64_t count) {
        const int64_t pieces = joined ? 1 : elements;
        for (int64_t i = 0; i < pieces; ++i) {
          body(element + at + i * along_, (g * n + r + i) * inner_.extent,
               Pieces{count, elements / pieces * inner_.extent, group.stride, group.mask_stride, mask_along,
                      n * inner_.extent});
        }
      });
    });
  }

  const View& view_;
  const Operands operands_;
  const Arithmetic<F> op_;
  const Mover<F> mover_;
  Dims groups_;
  Dim inner_, along_;
  int64_t all_groups_;
  Way way_;
  bool in_place_;      // whether the elements are runs of memory of the arithmetic's type, and have no mask
  int64_t block_;      // elements of a row that are summed up together
  int64_t batch_ = 1;  // blocks of a row that are turned together
  int64_t tile_groups_, tile_inner_, ranges_;

  int64_t first_group_ = 0, tile_groups_here_ = 0, first_inner_ = 0, inner_here_ = 0;
  int64_t loaded_begin_ = 0, loaded_end_ = 0;
  Block<F> held_{};
  int64_t capacity_ = 0;  // elements of each operand
  std::unique_ptr<F[]> buffer_;
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
