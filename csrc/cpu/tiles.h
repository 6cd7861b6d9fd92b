// How a view is cut into tiles, which are what threads take turns at, and how a tile's elements come to lie in blocks.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/block.h"
#include "cpu/cpu.h"
#include "cpu/transpose.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

struct Offset {
  int64_t element, mask;
};
// A dimension of the operands and of the mask.
struct MaskedDim {
  int64_t extent, stride, mask_stride;
};
struct MaskedDims {
  int size;
  MaskedDim dim[kMaxDims];

  MaskedDims(const Dims& dims, const int64_t (&mask_strides)[kMaxDims]) : size(dims.size) {
    for (int i = 0; i < size; ++i) dim[i] = {dims.dim[i].extent, dims.dim[i].stride, mask_strides[i]};
  }
};
Offset operator+(Offset a, Offset b) { return {a.element + b.element, a.mask + b.mask}; }
Offset operator*(int64_t n, const MaskedDim& dim) { return {n * dim.stride, n * dim.mask_stride}; }

// Where the index-th combination of the first `size` dimensions' indices lies, the innermost varying fastest.
Offset offset_of(const MaskedDims& dims, int size, int64_t index) {
  Offset offset{0, 0};
  for (int i = size - 1; i >= 0; --i) {
    offset = offset + index % dims.dim[i].extent * dims.dim[i];
    index /= dims.dim[i].extent;
  }
  return offset;
}

// Rows that are neighbours in memory, those of the innermost kept dimension, make a group, if the minor dimension is a
// kept one; else each row is a group. A tile is some of a group's rows, or some groups that lie one step of a dimension
// from one another. It is made into blocks in one of three ways:
//
//   along    lanes along rows: the minor dimension is reduced
//   across   lanes across the rows of one group
//   turned   lanes across rows as well, after a transposition: groups of few elements, and short rows
//
// Blocks are memory itself or, for turned rows and those that several reduced dimensions make up, a copy: a stage.
//
// How many elements of a row a block has depends on the row's length alone, and so do the bits of its sum. A row of
// more than one block is read twice. Where turned groups have such rows, their blocks take the place of groups.
template <class T>
class Tiles {
 public:
  Tiles(const View& view, const Operands& operands, const Arithmetic<T>& op)
      : view_(view),
        kept_(view.kept, operands.mask_strides.kept),
        reduced_(view.reduced, operands.mask_strides.reduced),
        operands_(operands),
        op_(op) {
    const int last = view.kept.size - 1;
    if (!view.minor_reduced) inner_ = kept_.dim[last];
    outer_dims_ = last + view.minor_reduced;
    if (outer_dims_ > 0) group_ = kept_.dim[--outer_dims_];
    along_ = reduced_.dim[reduced_.size - 1];

    way_ = view.minor_reduced && view.columns >= kLanes ? kAlong
           : inner_.extent < kLanes || (inner_.extent <= kMostVectors && inner_.extent * view.columns < kFewElements)
               ? kTurned
               : kAcross;
    const bool keeps = op.keeps_terms && !states_given() && view.columns <= (way_ == kAlong ? kKeptAlong : kKeptAcross);
    block_ = keeps ? view.columns : way_ == kAlong ? kBlockAlong : kBlockAcross;
    const int64_t elements = std::min(view.columns, block_);
    staged_ = way_ == kTurned || view.reduced.size > 1;
    if (way_ == kAlong) {
      tile_groups_ = std::clamp<int64_t>(kTileElements / view.columns, 1, kMostVectors * kLanes);
      if (staged_) tile_groups_ = std::max(tile_groups_, ceil_div(kRun, along_.extent));
    } else if (way_ == kAcross) {
      const int64_t bytes = view.columns * (keeps ? sizeof(F) : 2 * sizeof(T) * op.inputs);
      const int64_t rows = kHeldBytes / bytes < kRun ? kMostVectors * kLanes / 2 : kHeldBytes / bytes;
      const int64_t ranges = ceil_div(inner_.extent, std::min(rows / kRun * kRun, kMostVectors * kLanes));
      tile_inner_ = ceil_div(ceil_div(inner_.extent, ranges), kRun) * kRun;
    } else if (view.columns <= block_ || view.reduced.size > 1) {
      const int64_t fit = kTileElements / (elements * inner_.extent);
      tile_groups_ = std::clamp(fit / kLanes, int64_t{1}, kMostVectors / inner_.extent) * kLanes;
    } else {
      batch_ = kLanes;
    }
    tile_groups_ = std::min(tile_groups_, group_.extent);
    tile_inner_ = std::min(tile_inner_, inner_.extent);
    if (way_ != kAcross) tile_inner_ = inner_.extent;
    keeps_ = keeps;
    stage_elements_ = tile_groups_ * tile_inner_ * std::min(block_ * batch_, view.columns);
  }

  int64_t tiles() const { return view_.rows / (group_.extent * inner_.extent) * group_ranges() * inner_ranges(); }
  // Vectors of states of a tile's rows, at most.
  int64_t most_states() const { return ceil_div(tile_groups_ * tile_inner_, rows_of_state()); }
  // Elements of a row after which another part of it, which another thread may have, can begin. Turned rows have the
  // same as those that lie across, so that a row's bits do not depend on how many others lie beside it.
  int64_t part_length() const {
    if (view_.columns <= block_) return view_.columns;
    const int64_t unit = way_ == kAlong ? kLeastPartAlong : kLeastPartAcross;
    return ceil_div(ceil_div(view_.columns, kMostParts), unit) * unit;
  }

  void seek(int64_t tile) {
    const int64_t inner = tile % inner_ranges() * tile_inner_, rest = tile / inner_ranges();
    const int64_t group = rest % group_ranges() * tile_groups_;
    groups_ = std::min(tile_groups_, group_.extent - group);
    rows_ = std::min(tile_inner_, inner_.extent - inner);
    base_ = offset_of(kept_, outer_dims_, rest / group_ranges()) + group * group_ + inner * inner_;
    first_row_ = (rest / group_ranges() * group_.extent + group) * inner_.extent + inner;
    loaded_begin_ = loaded_end_ = 0;
  }
  int64_t states() const { return ceil_div(groups_ * rows_, rows_of_state()); }

  // Sums up elements [begin, end) of the tile's rows, a part or all parts.
  void accumulate(int64_t begin, int64_t end, States<T>* states) {
    if (view_.columns <= block_) {
      load(begin, end);
      return way().accumulate(held_, states);
    }
    op_.identity(states, this->states());
    States<T> later[kMostVectors];
    for (int64_t next; begin < end; begin = next) {
      next = batch_end(begin, end);
      load(begin, next);
      way().accumulate(held_, later);
      if (batch_ == 1) {
        op_.combine(states, later, this->states());
        continue;
      }
      const int64_t blocks = ceil_div(next - begin, block_);
      for (int64_t i = 0; i < rows_ * blocks; ++i) {  // those of a row one after the other
        States<T> one;
        for (int k = 0; k < kMembers; ++k) one.member[k] = C{} + later[i / kLanes].member[k][i % kLanes];
        op_.combine(&states[i / blocks], &one, 1);
      }
    }
  }

  // Of batches, the states of each row stand in all lanes of a vector.
  void finish(int64_t begin, int64_t end, const States<T>* states) {
    States<T> of_lanes[kMostVectors];
    for (int64_t next; begin < end; begin = next) {
      next = batch_end(begin, end);
      if (begin != loaded_begin_ || next != loaded_end_) load(begin, next);
      if (batch_ > 1) {
        const int64_t blocks = ceil_div(next - begin, block_);
        for (int64_t i = 0; i < rows_ * blocks; ++i) {
          for (int k = 0; k < kMembers; ++k) {
            of_lanes[i / kLanes].member[k][i % kLanes] = states[i / blocks].member[k][0];
          }
        }
      }
      way().finish(held_, batch_ > 1 ? of_lanes : states);
      if (staged_) op_.out_bytes == sizeof(T) ? store<T>(begin, next) : store<Int8>(begin, next);
    }
  }

  // Stores what rows themselves have as results, given the states of whole rows.
  void store_rows(const States<T>* states) const {
    States<T> results[kMostVectors];
    op_.row_results(states, this->states(), results);
    for (int64_t i = 0; i < groups_ * rows_; ++i) {
      const Row row = this->row(i);
      for (int k = 0; k < kMembers && operands_.of_rows[k]; ++k) {
        static_cast<F*>(operands_.of_rows[k])[row.number] = results[i / rows_of_state()].member[k][row.lane];
      }
    }
  }

  // Whether the results of rows are operands, and their states need not be accumulated.
  bool states_given() const { return operands_.given[0] != nullptr; }
  void take_given(States<T>* states) const {
    for (int64_t i = 0; i < groups_ * rows_; ++i) {
      for (int k = 0; k < kMembers && operands_.given[k]; ++k) {
        set(states[i / rows_of_state()].member[k], this->row(i), operands_.given[k]);
      }
    }
  }

  // Gives the states of whole rows the numbers that these rows have of their own.
  void take_numbers(States<T>* states) {
    if (!numbers_) numbers_.reset(new Numbers<T>[most_states()]);
    for (int64_t i = 0; i < groups_ * rows_; ++i) {
      for (int k = 0; k < kMostRowNumbersOnCpu && operands_.numbers[k]; ++k) {
        set(numbers_[i / rows_of_state()].number[k], this->row(i), operands_.numbers[k]);
      }
    }
    op_.take_numbers(states, numbers_.get(), this->states());
  }

  // After `finish`: the results of the labels' elements, and of rows that do not count, in memory.
  void finish_labels(int64_t begin, int64_t end, const States<T>* states) const {
    for (int64_t first = 0; first < groups_ * rows_; first += rows_of_state()) {
      const States<T>& of_rows = states[first / rows_of_state()];
      const Numbers<T>& numbers = numbers_[first / rows_of_state()];
      const int64_t n = std::min(rows_of_state(), groups_ * rows_ - first);
      T in[kLanes] = {}, results[kLanes];
      bool counts[kLanes] = {};
      int64_t places[kLanes];
      for (int64_t i = 0; i < n; ++i) {
        const Row row = this->row(first + i);
        const int64_t label = operands_.labels[row.number];
        places[i] = -1;
        if (label >= begin && label < end) {
          const Offset at = row.at + offset_of(reduced_, reduced_.size, label);
          places[i] = at.element;
          in[row.lane] = static_cast<const T*>(operands_.in[0])[at.element];
          counts[row.lane] = !operands_.mask || operands_.mask[at.mask];
        }
        if (!counts_at_all(of_rows, numbers, row.lane)) {
          clear(row, begin, end);
          places[i] = -1;
        }
      }
      op_.finish_labels(of_rows, numbers, in, counts, results);
      for (int64_t i = 0; i < n; ++i) {
        if (places[i] >= 0) static_cast<T*>(operands_.out)[places[i]] = results[i];
      }
    }
  }

 private:
  using F = typename Convert<T>::Compute;
  using C = typename Simd<F>::Value;
  static constexpr int64_t kLanes = Simd<F>::kLanes;
  static constexpr int kMembers = kMostRowResultsOnCpu;  // of states
  static constexpr int64_t kBlockAlong = 4096, kBlockAcross = 512;
  static constexpr int64_t kKeptAlong = 64 << 10, kKeptAcross = 2048;  // the longest rows whose terms are kept
  static constexpr int64_t kLeastPartAlong = 64 << 10, kLeastPartAcross = 4096, kMostParts = 64;
  static constexpr int64_t kTileElements = 4096;    // of a tile of short rows
  static constexpr int64_t kHeldBytes = 512 << 10;  // of a tile that is used twice, in the second cache
  static constexpr int64_t kRun = 256 / sizeof(T);  // neighbours that are worth reading without others
  static constexpr int64_t kFewElements = 512;      // of a group, which are not worth a tile
  enum Way { kAlong, kAcross, kTurned };

  const typename Arithmetic<T>::Way& way() const {
    if (keeps_) return way_ == kAlong ? op_.keeping_along : op_.keeping_across;
    return way_ == kAlong ? op_.along : op_.across;
  }

  struct Row {
    int64_t number;
    Offset at;  // its first element's
    int64_t lane;
  };
  // Of the tile's rows, the i-th in the order of lanes. Of turned rows, those of one group lie some apart.
  Row row(int64_t i) const {
    const int64_t group = way_ == kTurned ? i % groups_ : i / rows_, inner = way_ == kTurned ? i / groups_ : i % rows_;
    return {first_row_ + group * inner_.extent + inner, base_ + group * group_ + inner * inner_, i % rows_of_state()};
  }
  // Sets the row's lane, or all lanes of a row that has a vector to itself, to the row's number.
  void set(C& lanes, const Row& row, const void* numbers) const {
    const F number = static_cast<const F*>(numbers)[row.number];
    if (batch_ > 1) {
      lanes = C{} + number;
    } else {
      lanes[row.lane] = number;
    }
  }
  int64_t rows_of_state() const { return batch_ > 1 ? 1 : kLanes; }
  // A row whose own numbers are all 0 does not count. What its elements are multiplied by is 0 then, or NaN.
  static bool counts_at_all(const States<T>& states, const Numbers<T>& numbers, int64_t lane) {
    for (const C& number : numbers.number) {
      if (number[lane] != 0) return true;
    }
    return states.member[1][lane] == 0;
  }
  void clear(const Row& row, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      static_cast<T*>(operands_.out)[(row.at + offset_of(reduced_, reduced_.size, i)).element] = T{};
    }
  }
  int64_t group_ranges() const { return ceil_div(group_.extent, tile_groups_); }
  int64_t inner_ranges() const { return ceil_div(inner_.extent, tile_inner_); }
  // Of elements that are in a block, or turned, at once: whole blocks, or what is left that is none.
  int64_t batch_end(int64_t begin, int64_t end) const {
    const int64_t whole = std::min((end - begin) / block_, batch_);
    return whole > 0 ? begin + whole * block_ : end;
  }

  void load(int64_t begin, int64_t end) {
    loaded_begin_ = begin;
    loaded_end_ = end;
    const int64_t n = end - begin;
    allocate();
    held_.rows = groups_ * rows_;
    held_.elements = n;
    held_.terms = reinterpret_cast<F*>(terms_.get());
    if (!staged_) {
      const MaskedDim& line = way_ == kAlong ? group_ : along_;
      const Offset at = base_ + begin * along_;
      for (int k = 0; k < op_.inputs; ++k) held_.in[k] = static_cast<const T*>(operands_.in[k]) + at.element;
      held_.out = static_cast<char*>(operands_.out) + at.element * op_.out_bytes;
      held_.mask = operands_.mask ? operands_.mask + at.mask : nullptr;
      held_.step = line.stride;
      held_.mask_step = line.mask_stride;
      held_.mask_inner = way_ == kAlong ? along_.mask_stride : inner_.mask_stride;
      return;
    }
    if (batch_ > 1) {
      held_.rows *= ceil_div(n, block_);
      held_.elements = std::min(n, block_);
    }
    held_.step = held_.mask_step = way_ == kAlong ? n : held_.rows;
    held_.mask_inner = 1;
    held_.out = stage_.get();
    for (int k = 0; k < op_.inputs; ++k) {
      T* const stage = stage_.get() + k * stage_elements_;
      held_.in[k] = stage;
      const T* const memory = static_cast<const T*>(operands_.in[k]);
      for_pieces(begin, end, [&](Offset at, int64_t staged, Piece p) {
        if (way_ == kTurned) {
          transpose<16 / sizeof(T)>(memory + at.element, p.step, stage + staged, held_.rows / rows_, p.count, p.length);
        } else {
          copy(memory + at.element, p.step, stage + staged, held_.step, p.count, p.length);
        }
      });
    }
    if (mask_stage_) load_mask(begin, end);
    held_.mask = mask_stage_.get();
  }

  void allocate() {
    if (keeps_ && !terms_) {
      const int64_t lines = way_ == kAlong ? tile_groups_ : view_.columns;
      const int64_t length = way_ == kAlong ? view_.columns : tile_groups_ * tile_inner_;
      terms_.reset(new C[lines * ceil_div(length, kLanes)]);
    }
    if (staged_ && !stage_) {
      stage_.reset(new T[stage_elements_ * op_.inputs]);
      if (operands_.mask) mask_stage_.reset(new bool[stage_elements_]);
    }
  }

  template <class Out>
  void store(int64_t begin, int64_t end) {
    loaded_begin_ = loaded_end_ = 0;  // the results have taken the elements' place
    const Out* const stage = reinterpret_cast<const Out*>(stage_.get());
    Out* const memory = static_cast<Out*>(operands_.out);
    for_pieces(begin, end, [&](Offset at, int64_t staged, Piece p) {
      if (way_ == kTurned) {
        transpose<16 / sizeof(Out)>(stage + staged, held_.rows / rows_, memory + at.element, p.step, p.length, p.count);
      } else {
        copy(stage + staged, held_.step, memory + at.element, p.step, p.count, p.length);
      }
    });
  }

  struct Piece {
    int64_t count, length, step;  // runs of memory, elements of each, and from one to the next
  };

  // Calls body(at, staged, piece) for the runs of memory that the tile's elements [begin, end) are made of, and where
  // the first of each piece is in the stage.
  template <class Body>
  void for_pieces(int64_t begin, int64_t end, Body body) const {
    if (batch_ > 1) {  // blocks are neighbours in memory, since only one dimension is reduced
      const int64_t blocks = ceil_div(end - begin, block_), n = (end - begin) / blocks;
      if (along_.stride == rows_) return body(base_ + begin * along_, 0, Piece{blocks, n * rows_, n * along_.stride});
      for (int64_t i = 0; i < n; ++i) {
        body(base_ + (begin + i) * along_, i * held_.step, Piece{blocks, rows_, n * along_.stride});
      }
      return;
    }
    const int64_t row_step = way_ == kAlong ? 1 : held_.step;
    for (int64_t i = begin; i < end;) {
      const int64_t first = i % along_.extent, n = std::min(end - i, along_.extent - first);
      const Offset at = base_ + offset_of(reduced_, reduced_.size - 1, i / along_.extent) + first * along_;
      const int64_t staged = (i - begin) * row_step;
      if (way_ == kAcross) {
        body(at, staged, Piece{n, rows_, along_.stride});
      } else if (along_.stride == rows_) {
        body(at, staged, Piece{groups_, n * rows_, group_.stride});
      } else {  // a mask keeps neighbouring dimensions apart
        for (int64_t j = 0; j < n; ++j)
          body(at + j * along_, staged + j * row_step, Piece{groups_, rows_, group_.stride});
      }
      i += n;
    }
  }

  template <class U>
  static void copy(const U* from, int64_t from_step, U* to, int64_t to_step, int64_t count, int64_t length) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_step, from + i * from_step, length * sizeof(U));
  }

  void load_mask(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bool* const mask = operands_.mask + (base_ + offset_of(reduced_, reduced_.size, i)).mask;
      const int64_t r = i - begin;
      for (int64_t j = 0; j < rows_; ++j) {
        if (batch_ > 1) {
          const int64_t blocks = held_.rows / rows_;
          mask_stage_[r % held_.elements * held_.step + j * blocks + r / held_.elements] = mask[j * inner_.mask_stride];
          continue;
        }
        for (int64_t g = 0; g < groups_; ++g) {
          const int64_t at = way_ == kAlong ? g * held_.step + r : r * held_.step + j * groups_ + g;
          mask_stage_[at] = mask[g * group_.mask_stride + j * inner_.mask_stride];
        }
      }
    }
  }

  const View& view_;
  const MaskedDims kept_, reduced_;
  const Operands operands_;
  const Arithmetic<T> op_;
  MaskedDim along_;           // the innermost reduced dimension,
  MaskedDim inner_{1, 1, 0};  // that of a group's rows,
  MaskedDim group_{1, 0, 0};  // and that of a tile's groups
  int outer_dims_;            // the other kept dimensions
  Way way_;
  bool staged_, keeps_;
  int64_t block_;      // elements of a row that are summed up together
  int64_t batch_ = 1;  // blocks that are turned together
  int64_t tile_groups_ = 1, tile_inner_ = 1;
  std::unique_ptr<C[]> terms_;
  std::unique_ptr<Numbers<T>[]> numbers_;
  int64_t stage_elements_ = 0;  // of each operand
  std::unique_ptr<T[]> stage_;
  std::unique_ptr<bool[]> mask_stage_;

  Offset base_{0, 0};  // of the tile at hand, its groups, and rows of each
  int64_t groups_ = 0, rows_ = 0, first_row_ = 0;
  int64_t loaded_begin_ = 0, loaded_end_ = 0;
  Block<T> held_{};
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
