#include "cpu/cpu.h"

namespace jax_softmax::cpu {

namespace plain {
Kernel kernel(Op op, DType dtype, const View& view);
}

#if defined(__x86_64__)
namespace avx2 {
Kernel kernel(Op op, DType dtype, const View& view);
}
namespace avx512 {
Kernel kernel(Op op, DType dtype, const View& view);
}
#endif

const Variant kVariants[] = {
#if defined(__x86_64__)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     },
     avx512::kernel},
    {"avx2",
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); },
     avx2::kernel},
#endif
    {"plain", [] { return true; }, plain::kernel},
};
const int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

const Variant& variant() {
  static const Variant& chosen = [&]() -> const Variant& {
    const Variant* v = kVariants;
    while (!v->supported()) ++v;
    return *v;
  }();
  return chosen;
}

}  // namespace jax_softmax::cpu
