// The operators and element types by number, and what an operator costs: all that a planner knows of it.
#pragma once

namespace jax_softmax {

enum class Op {
  kSoftmax,
  kLogSoftmax,
  kSoftmaxLinear,
  kLogSoftmaxJvp,
  kLogSoftmaxVjp,
  kLogSumExp,
  kCrossEntropy,
  kCrossEntropyGradient,
  kEntropy,
  kKlDivergence,
  kAbsmaxScale
};
enum class DType { kF16, kBF16, kF32, kF64, kF8E4M3, kF8E5M2, kI8, kU8 };

inline constexpr int kDTypes = 8;
inline constexpr const char* kDTypeNames[kDTypes] = {"float16",       "bfloat16",    "float32", "float64",
                                                     "float8_e4m3fn", "float8_e5m2", "int8",    "uint8"};
inline constexpr int kDTypeBytes[kDTypes] = {2, 2, 4, 8, 1, 1, 1, 1};
constexpr int bytes_of(DType type) { return kDTypeBytes[static_cast<int>(type)]; }
// Integers are operands; the only ones that are results are int8, of operators that quantize.
constexpr bool is_integer(DType type) { return type == DType::kI8 || type == DType::kU8; }
constexpr DType result_of(DType operand) { return is_integer(operand) ? DType::kF32 : operand; }

struct Cost {
  int inputs;                   // operands
  int exponentials;             // of an element, in the sum and in the result
  int logarithms;               // of a row, or powers
  bool element_results = true;  // whether there is one for each element
  int row_results = 0;          // of a row itself
  int row_operands = 0;         // numbers that a row has of its own
  int sums = 1;                 // of a row
  bool labelled = false;        // whether a row has a label as well
};

struct Operator {
  const char* name;
  const char* type;  // in ops.h
  Cost cost;
  bool on_cpu = false;     // whether there is a CPU kernel, in csrc/cpu/kernels.cc
  bool quantizes = false;  // whether results may be integers
};

inline constexpr Operator kOperators[] = {
    {"softmax", "Softmax", {1, 1, 0}, true},
    {"log_softmax", "LogSoftmax", {1, 1, 1}, true},
    {"softmax_linear", "SoftmaxLinear", {2, 0, 0}, true},
    {"log_softmax_jvp", "LogSoftmaxJvp", {2, 1, 0}, true},
    {"log_softmax_vjp", "LogSoftmaxVjp", {2, 1, 0}, true},
    {"logsumexp", "LogSumExp", {1, 1, 1, false, 2}, true},
    {"cross_entropy", "CrossEntropy", {1, 1, 1, false, 3, 0, 1, true}},
    {"cross_entropy_gradient", "CrossEntropyGradient", {1, 1, 1, true, 2, 4, 1, true}},
    {"entropy", "Entropy", {1, 1, 1, false, 3, 0, 2}, true},
    {"kl_divergence", "KlDivergence", {2, 1, 1, false, 3, 2, 2}},
    {"absmax_scale", "AbsmaxScale", {1, 0, 0, true, 1}, true, true},
};
inline constexpr int kOps = sizeof(kOperators) / sizeof(kOperators[0]);
inline constexpr int kMostRowResults = 3;
constexpr const Operator& facts_of(Op op) { return kOperators[static_cast<int>(op)]; }
constexpr const Cost& cost_of(Op op) { return facts_of(op).cost; }

}  // namespace jax_softmax
