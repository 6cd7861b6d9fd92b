// The table of operators, and the element types. Planners see an operator's cost alone, never its name; Python reads
// the table as `_kernels.OPERATORS`.
#pragma once

#include <algorithm>
#include <optional>
#include <string_view>

#include "ops.h"

namespace jax_softmax {

enum : bool { kGpuOnly = false, kOnCpu = true };

// row(name, struct in ops.h, logarithms, where there are kernels): see Cost and OperatorFacts.
// clang-format off
#define JAX_SOFTMAX_OPERATORS(row)                                 \
  row(softmax, Softmax, 0, kOnCpu)                                 \
  row(log_softmax, LogSoftmax, 1, kOnCpu)                          \
  row(softmax_linear, SoftmaxLinear, 0, kOnCpu)                    \
  row(log_softmax_jvp, LogSoftmaxJvp, 0, kOnCpu)                   \
  row(log_softmax_vjp, LogSoftmaxVjp, 0, kOnCpu)                   \
  row(logsumexp, LogSumExp, 1, kOnCpu)                             \
  row(cross_entropy, CrossEntropy, 1, kGpuOnly)                    \
  row(cross_entropy_gradient, CrossEntropyGradient, 1, kOnCpu)     \
  row(entropy, Entropy, 1, kOnCpu)                                 \
  row(kl_divergence, KlDivergence, 1, kOnCpu)                      \
  row(absmax_scale, AbsmaxScale, 0, kOnCpu)                        \
  row(softmax_and_normalizer, SoftmaxAndNormalizer, 0, kGpuOnly)   \
  row(logsumexp_and_distances, LogSumExpAndDistances, 1, kGpuOnly) \
  row(cross_entropy_gradient_and_distances, CrossEntropyGradientAndDistances, 1, kGpuOnly) \
  row(softmax_gradient, SoftmaxGradient, 0, kGpuOnly) \
  row(log_softmax_gradient, LogSoftmaxGradient, 0, kGpuOnly)
// clang-format on

#define JAX_SOFTMAX_NUMBER(name, type, ...) k##type,
enum class Op { JAX_SOFTMAX_OPERATORS(JAX_SOFTMAX_NUMBER) };
#undef JAX_SOFTMAX_NUMBER

// Operands and results have one of the first four; results of operators that quantize may also have an 8-bit type other
// than uint8. Side operands have any.
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
  int sums;              // numbers that a row's sum has
  int state_bytes;       // of a row's state in float32
  int members;           // numbers that a CPU keeps of a row: of its state, of what `finish` takes, or its results
  int logarithms;        // of a row, or powers
};

struct OperatorFacts {
  const char* name;
  const char* type;  // its struct in ops.h, whose constants say what it takes and gives
  Cost cost;
  bool on_cpu;     // whether there is a CPU kernel
  bool quantizes;  // whether results may have 8 bits
};

// A policy without arithmetic, for reading the constants of an operator's struct.
struct NoArithmetic {
  using Value = float;
  struct Scaler {};
};

template <template <class> class T>
constexpr OperatorFacts row_of_table(const char* name, const char* type, int logarithms, bool on_cpu) {
  using Op = T<NoArithmetic>;
  using C = typename Op::C;
  constexpr int kSums = sizeof(typename Op::Sum) / sizeof(C), kFinished = sizeof(typename Op::Finished) / sizeof(C),
                kStateBytes = sizeof(StateOf<Op>);
  static_assert(kStateBytes % 8 == 0, "GPUs exchange states as words of 8 bytes: align Sum as Moments is");
  return {
      name,
      type,
      {Op::kInputs, Op::kElementResults, Op::kRowResults, Op::kRowNumbers, Op::kReadsLabelElement || Op::kAddsAtLabel,
       kSums, kStateBytes, std::max({1 + kSums, kFinished, Op::kRowResults}), logarithms},
      on_cpu,
      Op::kWithinRange};
}

#define JAX_SOFTMAX_ROW(name, type, ...) row_of_table<type>(#name, #type, __VA_ARGS__),
inline constexpr OperatorFacts kOperators[] = {JAX_SOFTMAX_OPERATORS(JAX_SOFTMAX_ROW)};
#undef JAX_SOFTMAX_ROW
inline constexpr int kOps = sizeof(kOperators) / sizeof(kOperators[0]);
constexpr int most(int Cost::* number, bool of_all) {
  int most = 0;
  for (const OperatorFacts& op : kOperators) {
    if ((of_all || op.on_cpu) && op.cost.*number > most) most = op.cost.*number;
  }
  return most;
}
inline constexpr int kMostRowResults = most(&Cost::row_results, true);
inline constexpr int kMostRowResultsOnCpu = most(&Cost::row_results, false);
inline constexpr int kMostRowNumbersOnCpu = most(&Cost::row_numbers, false);
inline constexpr int kMostMembersOnCpu = most(&Cost::members, false);
constexpr const OperatorFacts& facts_of(Op op) { return kOperators[static_cast<int>(op)]; }
constexpr const Cost& cost_of(Op op) { return facts_of(op).cost; }

inline std::optional<Op> op_of(std::string_view name) {
  for (int i = 0; i < kOps; ++i) {
    if (name == kOperators[i].name) return static_cast<Op>(i);
  }
  return {};
}

}  // namespace jax_softmax
