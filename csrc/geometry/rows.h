// How rows along the innermost dimension are covered with packs. A row is one run of contiguous elements, or several if
// other dimensions are reduced too. Each run is covered by as many packs as it may need wherever it begins.
#pragma once

#include "geometry/view.h"

namespace jax_softmax {

struct Runs {
  int64_t elements;  // of a run
  int64_t runs;      // of a row
  // In elements: a run's first pack begins at the last multiple of this at or before the run. 1: at the run's
  // beginning.
  int boundary;
  int64_t packs_of_run;
  int64_t packs;  // of a row
  bool exact;     // whether no pack has elements outside of its run

  constexpr bool aligned() const { return boundary == 1; }
};

// `boundary`: in bytes, as in plans (registers.h).
constexpr Runs runs_of(const View& view, int boundary, const Footprint& footprint) {
  Runs runs{};
  runs.elements = view.reduced.innermost().extent;
  runs.runs = view.columns / runs.elements;
  runs.boundary = boundary > 0 ? boundary / footprint.in_bytes : 1;
  runs.packs_of_run = ceil_div(runs.elements + runs.boundary - 1, footprint.width());
  runs.packs = runs.runs * runs.packs_of_run;
  runs.exact = runs.boundary == 1 && runs.elements % footprint.width() == 0;
  return runs;
}

// The boundary of a plan: 0 if all runs begin with whole packs, else `wanted` or, for rows of several runs, a pack.
constexpr int boundary_of(const View& view, int wanted, const Footprint& footprint) {
  const int width = footprint.width();
  const bool one_run = view.reduced.size == 1;
  bool aligned = true;
  for (int i = 0; i < view.batch.size; ++i) aligned &= view.batch.dim[i].stride % width == 0;
  for (int i = 0; i + 1 < view.reduced.size; ++i) aligned &= view.reduced.dim[i].stride % width == 0;
  if (one_run) aligned &= view.columns % width == 0;  // a single row is cut as one of many
  if (aligned || !footprint.packs) return 0;          // or elements are accessed one by one
  return one_run ? wanted : kPackBytes;
}

}  // namespace jax_softmax
