// What ties a plan to the kernel that it is of.
#pragma once

#include "device/memory.cuh"

namespace jax_softmax::device {

// Whether a plan has been made for what memory holds, so that geometry means the same to the planner and the kernel.
template <class Mem, class Plan>
inline constexpr bool kIsPlannedFor =
    Plan::kFootprint.in_bytes == static_cast<int>(sizeof(typename Mem::In)) &&
    Plan::kFootprint.out_bytes == static_cast<int>(sizeof(typename Mem::Out)) &&
    Plan::kFootprint.inputs == Mem::kInputs &&
    Plan::kFootprint.state_bytes == static_cast<int>(sizeof(StateOf<typename Mem::Op>)) &&
    Plan::kFootprint.packs == Mem::kPacks &&
    Plan::kFootprint.row_operands == (Mem::Op::kRowResults > 0 || Mem::Op::kRowNumbers > 0);

}  // namespace jax_softmax::device
