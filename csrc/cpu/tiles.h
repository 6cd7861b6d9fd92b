// How a view is cut into tiles, which threads take, and how a tile's elements become blocks.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/block.h"
#include "cpu/cpu.h"
#include "cpu/dims.h"
#include "cpu/transpose.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

// A view, cut into tiles; and the tile at hand (`seek`).
//
// If the minor dimension is a batch dimension, its rows, which are neighbours in memory, make a band; else each row is
// a band. A tile is some of a band's rows, or some bands along one more batch dimension. Its blocks are made in one of
// three ways:
//
//   kAlong        lanes along rows: the minor dimension is reduced
//   kAcross       lanes across the rows of one band
//   kTransposed   lanes across rows, after a transposition: bands of few elements, and short rows
//
// Blocks are memory itself or, of transposed rows and rows of several reduced dimensions, a copy: the stage.
//
// How many elements of a row a block has depends on the row's length alone, and so do the bits of its sum. A row of
// more than one block is read twice. Where such rows are transposed, a tile has one band, and several blocks of its
// rows are transposed together (`together_`): they lie in the stage as the blocks of so many bands would.
template <class T>
class TiledView {
 public:
  TiledView(const View& view, const Buffers& buffers, const BlockFunctions<T>& op)
      : view_(view),
        batch_dims_(view.batch, buffers.mask_strides.batch),
        reduced_dims_(view.reduced, buffers.mask_strides.reduced),
        buffers_(buffers),
        op_(op) {
    const int last = view.batch.size - 1;
    if (!view.minor_reduced) row_dim_ = batch_dims_.dim[last];
    outer_dims_ = last + view.minor_reduced;
    if (outer_dims_ > 0) band_dim_ = batch_dims_.dim[--outer_dims_];
    column_dim_ = reduced_dims_.dim[reduced_dims_.size - 1];

    lanes_ =
        view.minor_reduced && view.columns >= kLanes ? kAlong
        : row_dim_.extent < kLanes || (row_dim_.extent <= kMostVectors && row_dim_.extent * view.columns < kFewElements)
            ? kTransposed
            : kAcross;
    keeps_ = op.keeps_terms && view.columns <= (lanes_ == kAlong ? kKeptAlong : kKeptAcross);
    block_length_ = keeps_ ? view.columns : lanes_ == kAlong ? kBlockAlong : kBlockAcross;
    const int64_t elements = std::min(view.columns, block_length_);
    staged_ = lanes_ == kTransposed || view.reduced.size > 1;
    if (lanes_ == kAlong) {
      tile_bands_ = std::clamp<int64_t>(kTileElements / view.columns, 1, kMostVectors * kLanes);
      if (staged_) tile_bands_ = std::max(tile_bands_, ceil_div(kRun, column_dim_.extent));
    } else if (lanes_ == kAcross) {
      const int64_t bytes = view.columns * (keeps_ ? sizeof(F) : 2 * sizeof(T) * op.inputs);
      const int64_t rows = kCacheBytes / bytes < kRun ? kMostVectors * kLanes / 2 : kCacheBytes / bytes;
      const int64_t ranges = ceil_div(row_dim_.extent, std::min(rows / kRun * kRun, kMostVectors * kLanes));
      tile_rows_ = ceil_div(ceil_div(row_dim_.extent, ranges), kRun) * kRun;
    } else if (view.columns <= block_length_ || view.reduced.size > 1) {
      const int64_t fit = kTileElements / (elements * row_dim_.extent);
      tile_bands_ = std::clamp(fit / kLanes, int64_t{1}, kMostVectors / row_dim_.extent) * kLanes;
    } else {
      together_ = kLanes;
    }
    tile_bands_ = std::min(tile_bands_, band_dim_.extent);
    tile_rows_ = std::min(tile_rows_, row_dim_.extent);
    if (lanes_ != kAcross) tile_rows_ = row_dim_.extent;
    stage_elements_ = tile_bands_ * tile_rows_ * std::min(block_length_ * together_, view.columns);
  }

  int64_t tiles() const { return view_.rows / (band_dim_.extent * row_dim_.extent) * band_ranges() * row_ranges(); }
  // The most vectors of states of a tile's rows.
  int64_t most_states() const { return ceil_div(tile_bands_ * tile_rows_, rows_of_state()); }
  // Elements of a part of a row: another thread may take the next part. Transposed rows have parts as those of kAcross
  // have, so that a row's bits do not depend on how many rows lie beside it.
  int64_t part_length() const {
    if (view_.columns <= block_length_) return view_.columns;
    const int64_t unit = lanes_ == kAlong ? kLeastPartAlong : kLeastPartAcross;
    return ceil_div(ceil_div(view_.columns, kMostParts), unit) * unit;
  }

  void seek(int64_t tile) {
    const int64_t inner = tile % row_ranges() * tile_rows_, rest = tile / row_ranges();
    const int64_t band = rest % band_ranges() * tile_bands_;
    bands_ = std::min(tile_bands_, band_dim_.extent - band);
    rows_ = std::min(tile_rows_, row_dim_.extent - inner);
    base_ = offsets_of(batch_dims_, outer_dims_, rest / band_ranges()) + band * band_dim_ + inner * row_dim_;
    first_row_ = (rest / band_ranges() * band_dim_.extent + band) * row_dim_.extent + inner;
    loaded_begin_ = loaded_end_ = 0;
    if (buffers_.numbers[0]) load_numbers();
  }
  int64_t states() const { return ceil_div(bands_ * rows_, rows_of_state()); }

  // Sums elements [begin, end) of the tile's rows, one part or all.
  void accumulate(int64_t begin, int64_t end, States<T>* states) {
    if (view_.columns <= block_length_) {
      load(begin, end);
      return passes().accumulate(loaded_, states);
    }
    op_.identity(states, this->states());
    States<T> later[kMostVectors];
    Numbers<T> lane_numbers[kMostVectors];
    for (int64_t next; begin < end; begin = next) {
      next = load_end(begin, end);
      load(begin, next);
      if (together_ > 1 && numbers_) {
        spread(numbers_.get(), ceil_div(next - begin, block_length_), lane_numbers);
        loaded_.numbers = lane_numbers;
      }
      passes().accumulate(loaded_, later);
      if (together_ == 1) {
        op_.combine(states, later, this->states());
        continue;
      }
      const int64_t blocks = ceil_div(next - begin, block_length_);
      for (int64_t i = 0; i < rows_ * blocks; ++i) {  // those of a row one after the other
        States<T> one;
        for (int k = 0; k < kMostMembersOnCpu; ++k) one.member[k] = C{} + later[i / kLanes].member[k][i % kLanes];
        op_.combine(&states[i / blocks], &one, 1);
      }
    }
  }

  // Where blocks are transposed together, each row's state is in all lanes of a vector of its own.
  void finish(int64_t begin, int64_t end, const States<T>* states) {
    States<T> lane_states[kMostVectors];
    for (int64_t next; begin < end; begin = next) {
      next = load_end(begin, end);
      if (begin != loaded_begin_ || next != loaded_end_) load(begin, next);
      if (together_ > 1) {
        spread(states, ceil_div(next - begin, block_length_), lane_states);
      }
      passes().finish(loaded_, together_ > 1 ? lane_states : states);
      if (staged_) op_.out_bytes == sizeof(T) ? store<T>(begin, next) : store<Int8>(begin, next);
    }
  }

  // Stores the results of rows, given the states of whole rows.
  void store_rows(const States<T>* states) const {
    States<T> results[kMostVectors];
    op_.row_results(states, this->states(), results);
    for (int k = 0; k < kMostRowResultsOnCpu && buffers_.row_results[k]; ++k) {
      F* const to = static_cast<F*>(buffers_.row_results[k]);
      for_rows([&](int64_t state, int64_t number, int n) { store_first(to + number, results[state].member[k], n); },
               [&](int64_t state, const Row& row) { to[row.number] = results[state].member[k][row.lane]; });
    }
  }

  // BlockFunctions::take_numbers of the tile's rows.
  void take_numbers(States<T>* states) const { op_.take_numbers(states, numbers_.get(), this->states()); }

  // After `finish`: writes the results at labels, and those of rows that do not count.
  void finish_labels(int64_t begin, int64_t end, const States<T>* states) const {
    for (int64_t first = 0; first < bands_ * rows_; first += rows_of_state()) {
      const States<T>& row_states = states[first / rows_of_state()];
      const Numbers<T>& numbers = numbers_[first / rows_of_state()];
      const int64_t n = std::min(rows_of_state(), bands_ * rows_ - first);
      T in[kLanes] = {}, results[kLanes];
      bool counts[kLanes] = {};
      int64_t elements[kLanes];
      for (int64_t i = 0; i < n; ++i) {
        const Row row = this->row(first + i);
        const int64_t label = buffers_.labels[row.number];
        elements[i] = -1;
        if (label >= begin && label < end) {
          const Offsets offsets = row.offsets + offsets_of(reduced_dims_, reduced_dims_.size, label);
          elements[i] = offsets.element;
          in[row.lane] = static_cast<const T*>(buffers_.in[0])[offsets.element];
          counts[row.lane] = !buffers_.mask || buffers_.mask[offsets.mask];
        }
        if (must_clear(row_states, numbers, row.lane)) {
          clear(row, begin, end);
          elements[i] = -1;
        }
      }
      op_.finish_labels(row_states, numbers, in, counts, results);
      for (int64_t i = 0; i < n; ++i) {
        if (elements[i] >= 0) static_cast<T*>(buffers_.out)[elements[i]] = results[i];
      }
    }
  }

 private:
  using F = typename Convert<T>::Compute;
  using C = typename Simd<F>::Value;
  static constexpr int64_t kLanes = Simd<F>::kLanes;
  static constexpr int64_t kBlockAlong = 4096, kBlockAcross = 512;
  static constexpr int64_t kKeptAlong = 64 << 10, kKeptAcross = 2048;  // the longest rows whose terms are kept
  static constexpr int64_t kLeastPartAlong = 64 << 10, kLeastPartAcross = 4096, kMostParts = 64;
  static constexpr int64_t kTileElements = 4096;     // of a tile of short rows
  static constexpr int64_t kCacheBytes = 512 << 10;  // of a tile that is read twice, in the L2 cache
  static constexpr int64_t kRun = 256 / sizeof(T);   // contiguous elements: fewer are slow to read by themselves
  static constexpr int64_t kFewElements = 512;       // of a band: too few for a tile
  enum Lanes { kAlong, kAcross, kTransposed };

  const typename BlockFunctions<T>::Passes& passes() const {
    if (keeps_) return lanes_ == kAlong ? op_.keeping_along : op_.keeping_across;
    return lanes_ == kAlong ? op_.along : op_.across;
  }

  void load_numbers() {
    if (!numbers_) numbers_.reset(new Numbers<T>[most_states()]);
    for (int k = 0; k < kMostRowNumbersOnCpu && buffers_.numbers[k]; ++k) {
      const F* const from = static_cast<const F*>(buffers_.numbers[k]);
      for_rows([&](int64_t state, int64_t number, int n) { numbers_[state].number[k] = load_first(from + number, n); },
               [&](int64_t state, const Row& row) { set(numbers_[state].number[k], row, from[row.number]); });
    }
  }

  struct Row {
    int64_t number;
    Offsets offsets;  // its first element's
    int64_t lane;
  };
  // The tile's i-th row in the order of lanes: of transposed rows neighbours are of different bands.
  Row row(int64_t i) const {
    const int64_t lane = together_ > 1 ? 0 : i % kLanes;
    if (numbered_in_order()) return {first_row_ + i, base_ + i * (lanes_ == kAcross ? row_dim_ : band_dim_), lane};
    const int64_t band = lanes_ == kTransposed ? i % bands_ : i / rows_,
                  inner = lanes_ == kTransposed ? i / bands_ : i % rows_;
    return {first_row_ + band * row_dim_.extent + inner, base_ + band * band_dim_ + inner * row_dim_, lane};
  }
  // Whether rows that are neighbours in the order of lanes are neighbours in the arrays of what rows have.
  bool numbered_in_order() const { return row_dim_.extent == 1 || lanes_ == kAcross; }
  // Calls for_vector(state, number, n) for the vectors of n rows from row `number` on, or else for_row(state, row).
  template <class ForVector, class ForRow>
  void for_rows(ForVector for_vector, ForRow for_row) const {
    const int64_t rows = bands_ * rows_;
    if (together_ == 1 && numbered_in_order()) {
      for (int64_t i = 0; i < rows; i += kLanes) {
        for_vector(i / kLanes, first_row_ + i, static_cast<int>(std::min(kLanes, rows - i)));
      }
    } else {
      for (int64_t i = 0; i < rows; ++i) for_row(together_ > 1 ? i : i / kLanes, row(i));
    }
  }
  static C load_first(const F* p, int n) { return n == kLanes ? Simd<F>::load(p) : Simd<F>::load_first(p, n); }
  static void store_first(F* p, C v, int n) { n == kLanes ? Simd<F>::store(p, v) : Simd<F>::store_first(p, v, n); }
  // Sets the row's lane to the row's number or, where each row has a vector of its own, all lanes.
  void set(C& lanes, const Row& row, F number) const {
    if (together_ > 1) {
      lanes = C{} + number;
    } else {
      lanes[row.lane] = number;
    }
  }
  // Of rows that have a vector each: the lanes of their blocks, so many of each row, where these are transposed
  // together.
  template <class OfRow>
  void spread(const OfRow* rows, int64_t blocks, OfRow* lanes) const {
    constexpr int kMembers = sizeof(OfRow) / sizeof(C);
    for (int64_t i = 0; i < rows_ * blocks; ++i) {
      for (int k = 0; k < kMembers; ++k) {
        reinterpret_cast<C*>(lanes + i / kLanes)[k][i % kLanes] = reinterpret_cast<const C*>(rows + i / blocks)[k][0];
      }
    }
  }
  int64_t rows_of_state() const { return together_ > 1 ? 1 : kLanes; }
  // Whether a row does not count, since its numbers are all 0, and yet has results other than 0: the factor of its
  // terms, the second number that `finish` takes, is NaN.
  static bool must_clear(const States<T>& states, const Numbers<T>& numbers, int64_t lane) {
    for (const C& number : numbers.number) {
      if (number[lane] != 0) return false;
    }
    return states.member[1][lane] != 0;
  }
  void clear(const Row& row, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      static_cast<T*>(buffers_.out)[(row.offsets + offsets_of(reduced_dims_, reduced_dims_.size, i)).element] = T{};
    }
  }
  int64_t band_ranges() const { return ceil_div(band_dim_.extent, tile_bands_); }
  int64_t row_ranges() const { return ceil_div(row_dim_.extent, tile_rows_); }
  // The end of the elements that are loaded at once: whole blocks, or what is left after the last whole one.
  int64_t load_end(int64_t begin, int64_t end) const {
    const int64_t whole = std::min((end - begin) / block_length_, together_);
    return whole > 0 ? begin + whole * block_length_ : end;
  }

  // Makes a block of elements [begin, end) of the tile's rows.
  void load(int64_t begin, int64_t end) {
    loaded_begin_ = begin;
    loaded_end_ = end;
    const int64_t n = end - begin;
    allocate();
    loaded_.rows = bands_ * rows_;
    loaded_.elements = n;
    loaded_.terms = reinterpret_cast<F*>(terms_.get());
    loaded_.numbers = numbers_.get();
    if (!staged_) {
      const MaskedDim& line = lanes_ == kAlong ? band_dim_ : column_dim_;
      const Offsets offsets = base_ + begin * column_dim_;
      for (int k = 0; k < op_.inputs; ++k) loaded_.in[k] = static_cast<const T*>(buffers_.in[k]) + offsets.element;
      loaded_.out = static_cast<char*>(buffers_.out) + offsets.element * op_.out_bytes;
      loaded_.mask = buffers_.mask ? buffers_.mask + offsets.mask : nullptr;
      loaded_.stride = line.stride;
      loaded_.mask_stride = line.mask_stride;
      loaded_.mask_inner_stride = lanes_ == kAlong ? column_dim_.mask_stride : row_dim_.mask_stride;
      return;
    }
    if (together_ > 1) {
      loaded_.rows *= ceil_div(n, block_length_);
      loaded_.elements = std::min(n, block_length_);
    }
    loaded_.stride = loaded_.mask_stride = lanes_ == kAlong ? n : loaded_.rows;
    loaded_.mask_inner_stride = 1;
    loaded_.out = stage_.get();
    for (int k = 0; k < op_.inputs; ++k) {
      T* const stage = stage_.get() + k * stage_elements_;
      loaded_.in[k] = stage;
      const T* const memory = static_cast<const T*>(buffers_.in[k]);
      for_strided_runs(begin, end, [&](Offsets offsets, int64_t staged, StridedRuns runs) {
        if (lanes_ == kTransposed) {
          transpose<16 / sizeof(T)>(memory + offsets.element, runs.stride, stage + staged, loaded_.rows / rows_,
                                    runs.count, runs.length);
        } else {
          copy(memory + offsets.element, runs.stride, stage + staged, loaded_.stride, runs.count, runs.length);
        }
      });
    }
    if (mask_stage_) load_mask(begin, end);
    loaded_.mask = mask_stage_.get();
  }

  void allocate() {
    if (keeps_ && !terms_) {
      const int64_t lines = lanes_ == kAlong ? tile_bands_ : view_.columns;
      const int64_t length = lanes_ == kAlong ? view_.columns : tile_bands_ * tile_rows_;
      terms_.reset(new C[lines * ceil_div(length, kLanes)]);
    }
    if (staged_ && !stage_) {
      stage_.reset(new T[stage_elements_ * op_.inputs]);
      if (buffers_.mask) mask_stage_.reset(new bool[stage_elements_]);
    }
  }

  template <class Out>
  void store(int64_t begin, int64_t end) {
    loaded_begin_ = loaded_end_ = 0;  // the results have overwritten the elements
    const Out* const stage = reinterpret_cast<const Out*>(stage_.get());
    Out* const memory = static_cast<Out*>(buffers_.out);
    for_strided_runs(begin, end, [&](Offsets offsets, int64_t staged, StridedRuns runs) {
      if (lanes_ == kTransposed) {
        transpose<16 / sizeof(Out)>(stage + staged, loaded_.rows / rows_, memory + offsets.element, runs.stride,
                                    runs.length, runs.count);
      } else {
        copy(stage + staged, loaded_.stride, memory + offsets.element, runs.stride, runs.count, runs.length);
      }
    });
  }

  struct StridedRuns {
    int64_t count, length, stride;  // `count` runs of `length` contiguous elements, `stride` elements apart
  };

  // Calls body(offsets, staged, runs) for all runs of memory that elements [begin, end) of the tile's rows are in: the
  // offsets of the first run, in memory and in the stage.
  template <class Body>
  void for_strided_runs(int64_t begin, int64_t end, Body body) const {
    if (together_ > 1) {  // blocks are contiguous, since only one dimension is reduced
      const int64_t blocks = ceil_div(end - begin, block_length_), n = (end - begin) / blocks;
      if (column_dim_.stride == rows_)
        return body(base_ + begin * column_dim_, 0, StridedRuns{blocks, n * rows_, n * column_dim_.stride});
      for (int64_t i = 0; i < n; ++i) {
        body(base_ + (begin + i) * column_dim_, i * loaded_.stride, StridedRuns{blocks, rows_, n * column_dim_.stride});
      }
      return;
    }
    const int64_t row_step = lanes_ == kAlong ? 1 : loaded_.stride;
    for (int64_t i = begin; i < end;) {
      const int64_t first = i % column_dim_.extent, n = std::min(end - i, column_dim_.extent - first);
      const Offsets offsets =
          base_ + offsets_of(reduced_dims_, reduced_dims_.size - 1, i / column_dim_.extent) + first * column_dim_;
      const int64_t staged = (i - begin) * row_step;
      if (lanes_ == kAcross) {
        body(offsets, staged, StridedRuns{n, rows_, column_dim_.stride});
      } else if (column_dim_.stride == rows_) {
        body(offsets, staged, StridedRuns{bands_, n * rows_, band_dim_.stride});
      } else {  // the mask's strides keep dimensions apart
        for (int64_t j = 0; j < n; ++j)
          body(offsets + j * column_dim_, staged + j * row_step, StridedRuns{bands_, rows_, band_dim_.stride});
      }
      i += n;
    }
  }

  template <class U>
  static void copy(const U* from, int64_t from_stride, U* to, int64_t to_stride, int64_t count, int64_t length) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, length * sizeof(U));
  }

  void load_mask(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bool* const mask = buffers_.mask + (base_ + offsets_of(reduced_dims_, reduced_dims_.size, i)).mask;
      const int64_t r = i - begin;
      for (int64_t j = 0; j < rows_; ++j) {
        if (together_ > 1) {
          const int64_t blocks = loaded_.rows / rows_;
          mask_stage_[r % loaded_.elements * loaded_.stride + j * blocks + r / loaded_.elements] =
              mask[j * row_dim_.mask_stride];
          continue;
        }
        for (int64_t g = 0; g < bands_; ++g) {
          const int64_t at = lanes_ == kAlong ? g * loaded_.stride + r : r * loaded_.stride + j * bands_ + g;
          mask_stage_[at] = mask[g * band_dim_.mask_stride + j * row_dim_.mask_stride];
        }
      }
    }
  }

  const View& view_;
  const MaskedDims batch_dims_, reduced_dims_;
  const Buffers buffers_;
  const BlockFunctions<T> op_;
  MaskedDim column_dim_;         // the innermost reduced dimension,
  MaskedDim row_dim_{1, 1, 0};   // the one along a band's rows,
  MaskedDim band_dim_{1, 0, 0};  // and the one along a tile's bands
  int outer_dims_;               // the other batch dimensions
  Lanes lanes_;
  bool staged_, keeps_;   // whether blocks are copies, and whether their terms are kept
  int64_t block_length_;  // elements of a row in a block
  int64_t together_ = 1;  // blocks of a row that are transposed together
  int64_t tile_bands_ = 1, tile_rows_ = 1;
  std::unique_ptr<C[]> terms_;
  std::unique_ptr<Numbers<T>[]> numbers_;
  int64_t stage_elements_ = 0;  // of each operand
  std::unique_ptr<T[]> stage_;
  std::unique_ptr<bool[]> mask_stage_;

  Offsets base_{0, 0};  // of the tile at hand; its bands, and the rows of each
  int64_t bands_ = 0, rows_ = 0, first_row_ = 0;
  int64_t loaded_begin_ = 0, loaded_end_ = 0;
  Block<T> loaded_{};
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
