// The CPU schedules, compiled once for each instruction set. Nothing here may be visible outside the namespace that is
// named after it but the two functions at the end.
#include "cpu/columns.h"
#include "cpu/rows.h"
#include "cpu/short_rows.h"

namespace jax_softmax::cpu::JAX_SOFTMAX_ISA {
namespace {

template <template <class> class OpOf, class T, bool kMasked>
Kernel kernel_of_view(const View& view) {
  using Along = Parts<Rows<OpOf, T, kMasked>>;
  using Across = Parts<Columns<OpOf, T, kMasked>>;
  using Together = ShortRows<OpOf, T, kMasked>;
  if (Together::suits(view)) return {Together::work, Together::run};
  if (Columns<OpOf, T, kMasked>::suits(view)) return {Across::work, Across::run};
  return {Along::work, Along::run};
}

template <template <class> class OpOf>
Kernel kernel_of_dtype(DType dtype, const View& view) {
  switch (dtype) {
    case DType::kF16:
      return view.sides > 0 ? kernel_of_view<OpOf, Half, true>(view) : kernel_of_view<OpOf, Half, false>(view);
    case DType::kBF16:
      return view.sides > 0 ? kernel_of_view<OpOf, BFloat16, true>(view) : kernel_of_view<OpOf, BFloat16, false>(view);
    case DType::kF32:
      return view.sides > 0 ? kernel_of_view<OpOf, float, true>(view) : kernel_of_view<OpOf, float, false>(view);
    case DType::kF64:
      return view.sides > 0 ? kernel_of_view<OpOf, double, true>(view) : kernel_of_view<OpOf, double, false>(view);
  }
  __builtin_unreachable();
}

}  // namespace

Kernel kernel(Op op, DType dtype, const View& view) {
  switch (op) {
    case Op::kSoftmax:
      return kernel_of_dtype<Softmax>(dtype, view);
    case Op::kLogSoftmax:
      return kernel_of_dtype<LogSoftmax>(dtype, view);
    case Op::kSoftmaxLinear:
      return kernel_of_dtype<SoftmaxLinear>(dtype, view);
    case Op::kLogSoftmaxJvp:
      return kernel_of_dtype<LogSoftmaxJvp>(dtype, view);
    case Op::kLogSoftmaxVjp:
      return kernel_of_dtype<LogSoftmaxVjp>(dtype, view);
  }
  __builtin_unreachable();
}

}  // namespace jax_softmax::cpu::JAX_SOFTMAX_ISA
