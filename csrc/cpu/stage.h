// Elements that lie apart, moved to where lanes lie across rows.
#pragma once

#include <algorithm>
#include <memory>

#include "cpu/parts.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

template <int first, class V, int... j>
JAX_SOFTMAX_INLINE V interleave(V a, V b, std::integer_sequence<int, j...>) {
  return __builtin_shufflevector(a, b, (first + j / 2 + j % 2 * static_cast<int>(sizeof...(j)))...);
}

// Writes to[c * to_step + r] = from[r * from_step + c] for r and c below n.
template <int n, class U>
JAX_SOFTMAX_INLINE void transpose_square(const U* from, int64_t from_step, U* to, int64_t to_step) {
  using Bits = std::conditional_t<sizeof(U) == 2, uint16_t, std::conditional_t<sizeof(U) == 4, uint32_t, uint64_t>>;
  using V = Vector<Bits, n>;
  using Lanes = std::make_integer_sequence<int, n>;
  V v[n], mixed[n];
  unrolled<n>([&](auto i) { std::memcpy(&v[i], from + i * from_step, sizeof(V)); });
  unrolled<n == 8   ? 3
           : n == 4 ? 2
                    : 1>([&](auto) {
    unrolled<n / 2>([&](auto i) {
      mixed[2 * i] = interleave<0>(v[i], v[i + n / 2], Lanes());
      mixed[2 * i + 1] = interleave<n / 2>(v[i], v[i + n / 2], Lanes());
    });
    unrolled<n>([&](auto i) { v[i] = mixed[i]; });
  });
  unrolled<n>([&](auto i) { std::memcpy(to + i * to_step, &v[i], sizeof(V)); });
}

// The same for any numbers of rows and columns, by squares as long as there is room for one. The last ones overlap
// those before.
template <int n, class U>
void transpose(const U* from, int64_t from_step, U* to, int64_t to_step, int64_t rows, int64_t columns) {
  if constexpr (n == 1 || n * sizeof(U) < 8) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) to[c * to_step + r] = from[r * from_step + c];
    }
  } else {
    if (rows < n || columns < n) return transpose<n / 2>(from, from_step, to, to_step, rows, columns);
    for (int64_t i = 0; i < rows; i += n) {
      const int64_t r = std::min(i, rows - n);
      for (int64_t j = 0; j < columns; j += n) {
        const int64_t c = std::min(j, columns - n);
        transpose_square<n>(from + r * from_step + c, from_step, to + c * to_step + r, to_step);
      }
    }
  }
}

// A stage: elements of several rows that lie apart, moved to lie side by side as neighbouring columns do, and the
// results moved back. The rows are those of the innermost kept dimension, if that is the minor one, for each of a range
// of groups, which are the combinations of the other kept dimensions.
template <class A, class T>
class Stage {
 public:
  Stage(const View& view, const A& outside)
      : view_(view),
        outside_(outside),
        outer_(view.kept.size - !view.minor_reduced),
        inner_(view.minor_reduced ? Dim{1, 1, 0} : view.kept.dim[outer_]),
        all_groups_(view.rows / inner_.extent),
        most_groups_(std::min(all_groups_, groups_that_fit())),
        width_(ceil_div(most_groups_ * inner_.extent, A::kLanes) * A::kLanes),
        length_(view.columns * width_ <= kMostElements ? view.columns : kElements / width_ / kUnroll * kUnroll),
        contiguous_(along().stride == inner_.extent && (inner_.extent == 1 || width_ == most_groups_ * inner_.extent)),
        access_(Operands{}, 1) {
    dims_.size = 1;
    dims_.dim[0] = {length_, width_, width_};
  }

  int64_t tiles() const { return ceil_div(all_groups_, most_groups_); }
  int64_t width() const { return width_; }
  int64_t length() const { return length_; }  // elements of each row
  const Dims& dims() const { return dims_; }
  const A& access() const { return access_; }

  void seek(int64_t tile) {
    if (!elements_) allocate();
    first_group_ = tile * most_groups_;
    groups_ = std::min(most_groups_, all_groups_ - first_group_);
    loaded_begin_ = loaded_end_ = 0;
  }

  // Elements [begin, end) of the tile's rows, no more than length(), if they are not there already.
  void load(int64_t begin, int64_t end) {
    if (begin == loaded_begin_ && end == loaded_end_) return;
    loaded_begin_ = begin;
    loaded_end_ = end;
    for (int k = 0; k < A::Op::kInputs; ++k) {
      T* const inside = elements_.get() + k * length_ * width_;
      if (contiguous_) {
        for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
          transpose<kSquare>(outside_.in[k] + at.element, across().stride, inside + here, inside_step(), groups,
                             elements * inner_.extent);
        });
      } else {
        for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
          const Move from{across().stride, along().stride, inner_.stride};
          move(outside_.in[k] + at.element, from, inside + here, inside_move(), groups, elements);
        });
      }
    }
    if (A::kHasMask) {
      for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
        const Move from{across().side[0], along().side[0], inner_.side[0]};
        move(outside_.mask + at.mask, from, mask_.get() + here, inside_move(), groups, elements);
      });
    }
  }

  void store(int64_t begin, int64_t end) {
    loaded_begin_ = loaded_end_ = 0;  // the results have taken the elements' place
    T* const inside = elements_.get();
    if (contiguous_) {
      for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
        transpose<kSquare>(inside + here, inside_step(), outside_.out + at.element, across().stride,
                           elements * inner_.extent, groups);
      });
    } else {
      for_rectangles(begin, end, [&](Offset at, int64_t here, int64_t groups, int64_t elements) {
        const Move to{across().stride, along().stride, inner_.stride};
        move(inside + here, inside_move(), outside_.out + at.element, to, groups, elements);
      });
    }
  }

 private:
  static constexpr int64_t kElements = 2048;
  static constexpr int64_t kMostElements = kHeldBytes / static_cast<int64_t>(sizeof(T)) / A::Op::kInputs;
  static constexpr int64_t kWidth = 64;
  static constexpr int kSquare = 16 / sizeof(T);
  // Distances between neighbouring groups, elements and innermost kept elements.
  struct Move {
    int64_t group, element, inner;
  };

  const Dim& along() const { return view_.reduced.dim[view_.reduced.size - 1]; }
  Dim across() const { return outer_ > 0 ? view_.kept.dim[outer_ - 1] : Dim{1, 0, 0}; }
  int64_t inside_step() const { return inner_.extent == 1 ? width_ : most_groups_; }
  Move inside_move() const { return {1, width_, most_groups_}; }

  // As many as make a stage wide enough; whole vectors of them.
  int64_t groups_that_fit() const {
    const int64_t fit = std::max(kWidth, kElements / std::max<int64_t>(view_.columns, kUnroll)) / inner_.extent;
    return std::max<int64_t>(1, fit / A::kLanes) * A::kLanes;
  }

  void allocate() {
    elements_.reset(new T[A::Op::kInputs * length_ * width_]());
    if (A::kHasMask) mask_.reset(new bool[length_ * width_]());
    T* const second = elements_.get() + (A::Op::kInputs - 1) * length_ * width_;
    access_ = A(Operands{{elements_.get(), second}, mask_.get(), elements_.get()}, 1);
  }

  // The elements [begin, end) of the tile's rows, in pieces in which groups and elements each follow a dimension.
  template <class Body>
  JAX_SOFTMAX_INLINE void for_rectangles(int64_t begin, int64_t end, Body body) const {
    Odometer elements(view_.reduced, view_.reduced.size - 1, begin / along().extent);
    int64_t index = begin % along().extent;
    for (int64_t r = begin; r < end; elements.advance(), index = 0) {
      const int64_t n = std::min(end - r, along().extent - index);
      Odometer groups(view_.kept, std::max(outer_ - 1, 0), first_group_ / across().extent);
      int64_t first = first_group_ % across().extent;
      for (int64_t g = 0; g < groups_; groups.advance(), first = 0) {
        const int64_t m = std::min(groups_ - g, across().extent - first);
        const Offset base = elements.offset() + groups.offset() + index * along() + first * across();
        body(base, (r - begin) * width_ + g, m, n);
        g += m;
      }
      r += n;
    }
  }

  template <class U>
  void move(const U* from, const Move& from_step, U* to, const Move& to_step, int64_t groups, int64_t elements) const {
    for (int64_t k = 0; k < inner_.extent; ++k, from += from_step.inner, to += to_step.inner) {
      for (int64_t r = 0; r < elements; ++r) {
        const U* const from_row = from + r * from_step.element;
        U* const to_row = to + r * to_step.element;
        for (int64_t g = 0; g < groups; ++g) to_row[g * to_step.group] = from_row[g * from_step.group];
      }
    }
  }

  const View& view_;
  const A& outside_;
  const int outer_;
  const Dim inner_;
  const int64_t all_groups_, most_groups_, width_, length_;
  const bool contiguous_;
  Dims dims_;
  int64_t first_group_ = 0, groups_ = 0, loaded_begin_ = 0, loaded_end_ = 0;
  std::unique_ptr<T[]> elements_;
  std::unique_ptr<bool[]> mask_;
  A access_;
};

}  // namespace
}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
