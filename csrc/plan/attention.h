// Which kernel of attention computes a call, with which tiles. Nothing here needs a device or XLA.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "attention/geometry.h"
#include "core/call.h"
#include "core/gpu.h"

namespace jax_softmax {

// A call of attention.
//
// Operands: q, k, v; of the backward kernels also the output's cotangent, the rows' numbers, and delta, and of the
// kernel of tangents those of q, k and v; the bounds, if there are masks: see `visited`; the arrays among the sides.
// Results: the output, the rows' numbers, for a backward pass what the output lost by rounding, and the output's
// tangent; dk and dv; or dq; and the sides' cotangents that the kernel makes.
struct AttentionCall : CustomCall {
  std::string kernel;   // one of kKernelNames
  std::string letters;  // of the dimensions of q, k and v: "bihd,bjhd,bjhe"; see fusion/attention/letters.py
  std::string sides;    // "array:hij" or "index:i" for each side, by its letters; "bounds:bh" before them
  // The letters of each side's cotangent that the kernel makes: "bhi" of sums over keys, "hj" over queries, "bhij" of
  // none (the first one alone), and of the kernel of scores "phij", in p parts that XLA adds up.
  std::string side_cotangents;
  std::string expressions;  // lines of C++: of the functions in blocks.cuh that the kernel has, in their order
  std::string factor;       // a number as C++: of the weights in the output
  std::string empty_rows;   // "zero" or "nan": the weights of rows whose scores are all -inf

  template <class Self, class F>
  static void each(Self& call, F f) {
    f("kernel", call.kernel), f("letters", call.letters), f("sides", call.sides), f("expressions", call.expressions);
    f("factor", call.factor), f("empty_rows", call.empty_rows), f("side_cotangents", call.side_cotangents);
  }
};

// Why there are no kernels for these letters, extents by letters, and dtype of q, k and v; or nothing.
std::string why_no_attention(std::string_view letters, const std::map<char, int64_t>& extents, std::string_view dtype);

// Sets the kernel for a device; returns what is wrong with the call, or nothing.
std::string plan_attention(const AttentionCall& call, const Device& device, Step<jit::Source>* step);

}  // namespace jax_softmax
