// The table of operators, and the element types. Planners see an operator's cost alone, never its name; Python reads
// the table as `_kernels.OPERATORS`.
#pragma once

#include <optional>
#include <string_view>

#include "ops.h"

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
  kAbsmaxScale,
  kSoftmaxAndNormalizer,
  kLogSumExpAndDistances,
  kCrossEntropyGradientAndDistances
};
// Operands have one of the first four, and so have results, or of operators that quantize one of 8 bits. Side operands
// have any.
enum class DType { kF16, kBF16, kF32, kF64, kF8E4M3, kF8E5M2, kI8, kU8, kI32, kBool };

inline constexpr int kDTypes = 10;
inline constexpr const char* kDTypeNames[kDTypes] = {"float16",     "bfloat16", "float32", "float64", "float8_e4m3fn",
                                                     "float8_e5m2", "int8",     "uint8",   "int32",   "bool"};
inline constexpr int kDTypeBytes[kDTypes] = {2, 2, 4, 8, 1, 1, 1, 1, 4, 1};
constexpr const char* name_of(DType type) { return kDTypeNames[static_cast<int>(type)]; }
constexpr int bytes_of(DType type) { return kDTypeBytes[static_cast<int>(type)]; }
constexpr bool is_element(DType type) { return type < DType::kF8E4M3; }
constexpr bool is_quantized(DType type) { return DType::kF8E4M3 <= type && type <= DType::kI8; }

struct Cost {
  int inputs;            // operands of one shape
  bool element_results;  // whether there is a result for each element
  int row_results;       // results that a row has itself
  int row_numbers;       // operands that have one number for each row
  bool labelled;         // whether there is an operand that has a label for each row
  int sums;              // of a row
  int exponentials;      // of an element, in the sum and in the result
  int logarithms;        // of a row, or powers
};

struct Operator {
  const char* name;
  const char* type;  // its struct in ops.h, whose constants say what it takes and gives
  Cost cost;
  bool on_cpu;     // whether there is a CPU kernel, in csrc/cpu/kernels.cc
  bool quantizes;  // whether results may have 8 bits
};

// Arithmetic that is enough to ask an operator's struct for its constants.
struct NoArithmetic {
  using Value = float;
  struct Factor {};
};

enum : bool { kGpuOnly = false, kOnCpu = true };

template <template <class> class T>
constexpr Operator row_of_table(const char* name, const char* type, int exponentials, int logarithms, bool on_cpu) {
  using Op = T<NoArithmetic>;
  return {name,
          type,
          {Op::kInputs, Op::kElementResults, Op::kRowResults, Op::kRowNumbers, Op::kLabelled,
           static_cast<int>(sizeof(typename Op::Sum) / sizeof(typename Op::C)), exponentials, logarithms},
          on_cpu,
          Op::kWithinRange};
}

// In the order of Op: exponentials, logarithms, and where there are kernels.
inline constexpr Operator kOperators[] = {
    row_of_table<Softmax>("softmax", "Softmax", 1, 0, kOnCpu),
    row_of_table<LogSoftmax>("log_softmax", "LogSoftmax", 1, 1, kOnCpu),
    row_of_table<SoftmaxLinear>("softmax_linear", "SoftmaxLinear", 0, 0, kOnCpu),
    row_of_table<LogSoftmaxJvp>("log_softmax_jvp", "LogSoftmaxJvp", 1, 0, kOnCpu),
    row_of_table<LogSoftmaxVjp>("log_softmax_vjp", "LogSoftmaxVjp", 1, 0, kOnCpu),
    row_of_table<LogSumExp>("logsumexp", "LogSumExp", 1, 1, kOnCpu),
    row_of_table<CrossEntropy>("cross_entropy", "CrossEntropy", 1, 1, kGpuOnly),
    row_of_table<CrossEntropyGradient>("cross_entropy_gradient", "CrossEntropyGradient", 1, 1, kOnCpu),
    row_of_table<Entropy>("entropy", "Entropy", 1, 1, kOnCpu),
    row_of_table<KlDivergence>("kl_divergence", "KlDivergence", 1, 1, kGpuOnly),
    row_of_table<AbsmaxScale>("absmax_scale", "AbsmaxScale", 0, 0, kOnCpu),
    row_of_table<SoftmaxAndNormalizer>("softmax_and_normalizer", "SoftmaxAndNormalizer", 1, 0, kGpuOnly),
    row_of_table<LogSumExpAndDistances>("logsumexp_and_distances", "LogSumExpAndDistances", 1, 1, kGpuOnly),
    row_of_table<CrossEntropyGradientAndDistances>("cross_entropy_gradient_and_distances",
                                                   "CrossEntropyGradientAndDistances", 2, 1, kGpuOnly),
};
inline constexpr int kOps = sizeof(kOperators) / sizeof(kOperators[0]);
constexpr int most(int Cost::* number, bool of_all) {
  int most = 0;
  for (const Operator& op : kOperators) {
    if ((of_all || op.on_cpu) && op.cost.*number > most) most = op.cost.*number;
  }
  return most;
}
inline constexpr int kMostRowResults = most(&Cost::row_results, true);
inline constexpr int kMostRowResultsOnCpu = most(&Cost::row_results, false);
inline constexpr int kMostRowNumbersOnCpu = most(&Cost::row_numbers, false);
constexpr const Operator& facts_of(Op op) { return kOperators[static_cast<int>(op)]; }
constexpr const Cost& cost_of(Op op) { return facts_of(op).cost; }

inline std::optional<Op> op_of(std::string_view name) {
  for (int i = 0; i < kOps; ++i) {
    if (name == kOperators[i].name) return static_cast<Op>(i);
  }
  return {};
}

}  // namespace jax_softmax
