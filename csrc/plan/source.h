// The text of a plan's kernels: what NVRTC compiles.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace jax_softmax {

// What a kernel reads and writes, and what is fused into it.
struct Types {
  Op op;
  DType in, out;
  // The value of an element, in C++, of `x` and of the side operands' elements s[0], s[1], ...: empty if it is x.
  std::string fused;
  std::vector<DType> sides;  // of those
};

// A translation unit that defines `kernel`, for a step of the plan.
std::string source_of(const Plan& plan, const Step& step, const Problem& problem, const Types& types);

}  // namespace jax_softmax
