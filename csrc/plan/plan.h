// Which kernels compute a call on a GPU. A plan is a struct of its schedule. Nothing here needs a device or XLA.
//
// Each schedule has a file here, with its thresholds; one in geometry/, with its struct and the counts that follow from
// it; and one in device/, with its kernel, which has the struct as a constant. A struct's `each` lists its fields for
// the generated source, for `explain` and for tests.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/call.h"
#include "core/gpu.h"
#include "geometry/chunks.h"
#include "geometry/registers.h"
#include "geometry/rows.h"
#include "geometry/staged.h"
#include "geometry/tile.h"
#include "geometry/twice.h"
#include "geometry/view.h"

namespace jax_softmax {

inline constexpr int kSectorBytes = 32;      // of the last cache: what memory is written by in the end
inline constexpr int kCacheLineBytes = 128;  // of the last cache

// An operand has at least so many times the bytes of scratch memory: a ratio, so that a row's plan does not depend on
// how many rows there are.
inline constexpr int kOperandOfScratch = 20;

// What plans are made for, with a Device: a call.
struct Problem {
  View view;
  std::vector<SideStrides> sides;  // of the operands that broadcast
  Cost cost;
  Footprint footprint;
  bool float64;  // whether an array has that dtype, which no kernel has
  bool masked;
  bool identity_load;  // whether `load` is empty: elements can be compared, and pads put among them, as they are in
                       // memory
};

// Sets the problem of a call whose operands are aligned to packs; returns an error message, or nothing.
std::string problem_of(const Call& call, Problem* problem);

using Plan = std::variant<Registers, Staged, Chunks, Ring, Tile, Twice, TwiceTile>;
// In the order of Plan: schedules, and the headers of their kernels in device/.
inline constexpr const char* kScheduleNames[] = {"registers", "staged", "chunks", "ring", "tile", "twice", "twice"};

// The fastest plan that fits, or none. The order in which a row's elements are added up does not depend on how many
// rows there are.
std::optional<Plan> make_plan(const Problem& problem, const Device& device);

// Bytes of device memory in which the plan's blocks exchange states.
int64_t scratch_bytes(const Plan& plan, const Problem& problem);

// ---- for each schedule: the plan, if it fits

std::optional<Registers> plan_registers(const Problem& problem, const Device& device);
std::optional<Staged> plan_staged(const Problem& problem);
std::optional<Chunks> plan_chunks(const Problem& problem, const Device& device);
std::optional<Ring> plan_ring(const Problem& problem, const Device& device);
std::optional<Tile> plan_tile(const Problem& problem, const Device& device);
std::optional<Twice> plan_twice(const Problem& problem);
std::optional<TwiceTile> plan_twice_tile(const Problem& problem, bool one_block);

Launch launch_of(const Chunks& plan, const Problem& problem);
Launch launch_of(const Tile& plan, const Problem& problem, const Device& device);

// The text of the kernel that runs a function of device/, which NVRTC compiles: a translation unit that defines
// `kernel`.
std::string source_of(const Plan& plan, const Step<const char*>& step, const Problem& problem, const Call& call);

// A plan has one step or more, in order.
std::vector<Step<jit::Source>> steps_of(const Plan& plan, const Problem& problem, const Call& call,
                                        const Device& device);

}  // namespace jax_softmax
