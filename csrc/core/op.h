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
  kCrossEntropyGradient,
  kEntropy,
  kKlDivergence,
  kLogSum
};
enum class DType { kF16, kBF16, kF32, kF64, kF8E4M3, kF8E5M2, kI8, kU8 };

inline constexpr int kOps = 10;
inline constexpr const char* kOpNames[kOps] = {
    "softmax",         "log_softmax", "softmax_linear",         "log_softmax_jvp",
    "log_softmax_vjp", "logsumexp",   "cross_entropy_gradient", "entropy",
    "kl_divergence",   "log_sum"};
inline constexpr int kMostRowResults = 3;
inline constexpr int kDTypes = 8;
inline constexpr const char* kDTypeNames[kDTypes] = {"float16",       "bfloat16",    "float32", "float64",
                                                     "float8_e4m3fn", "float8_e5m2", "int8",    "uint8"};
inline constexpr int kDTypeBytes[kDTypes] = {2, 2, 4, 8, 1, 1, 1, 1};
constexpr int bytes_of(DType type) { return kDTypeBytes[static_cast<int>(type)]; }
// Integers are operands alone.
constexpr bool is_integer(DType type) { return type == DType::kI8 || type == DType::kU8; }
constexpr DType result_of(DType operand) { return is_integer(operand) ? DType::kF32 : operand; }

struct Cost {
  int inputs;                   // operands
  int exponentials;             // of an element, in the sum and in the result
  int logarithms;               // of a row
  bool element_results = true;  // whether there is one for each element
  int row_results = 0;          // of a row itself
  int row_operands = 0;         // numbers that a row has of its own
  int sums = 1;                 // of a row
};

inline constexpr Cost kCosts[kOps] = {{1, 1, 0},
                                      {1, 1, 1},
                                      {2, 0, 0},
                                      {2, 1, 0},
                                      {2, 1, 0},
                                      {1, 1, 1, false, 2},
                                      {1, 1, 1, true, 2, 3},
                                      {1, 1, 1, false, 3, 0, 2},
                                      {2, 1, 1, false, 3, 2, 2},
                                      {1, 1, 1, false, 2}};
constexpr Cost cost_of(Op op) { return kCosts[static_cast<int>(op)]; }

}  // namespace jax_softmax
