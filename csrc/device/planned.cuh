// What ties a plan to the kernel that it is of.
#pragma once

#include "device/memory.cuh"

namespace jax_softmax::device {

// Whether a plan has been made for what memory holds, so that geometry means the same to the planner and the kernel.
template <class Mem, class Plan>
inline constexpr bool kIsPlannedFor =
    Plan::kCall.in_bytes == static_cast<int>(sizeof(typename Mem::In)) &&
    Plan::kCall.out_bytes == static_cast<int>(sizeof(typename Mem::Out)) && Plan::kCall.inputs == Mem::kInputs &&
    Plan::kCall.state_bytes == static_cast<int>(sizeof(StateOf<typename Mem::Op>)) &&
    Plan::kCall.packs == Mem::kPacks &&
    Plan::kCall.row_operands == (Mem::Op::kRowResults > 0 || Mem::Op::kRowNumbers > 0);

}  // namespace jax_softmax::device
