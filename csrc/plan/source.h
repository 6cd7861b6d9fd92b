// The text of a plan's kernels: what NVRTC compiles.
#pragma once

#include <string>

#include "core/call.h"
#include "plan/plan.h"

namespace jax_softmax {

// A translation unit that defines `kernel`, for a step of the plan.
std::string source_of(const Plan& plan, const Step& step, const Problem& problem, const Call& call);

}  // namespace jax_softmax
