#include "cpu/cpu.h"

#include <atomic>

namespace jax_softmax::cpu {

#define JAX_SOFTMAX_DECLARE(isa)                                                                                     \
  namespace isa {                                                                                                    \
  Work work(Op op, DType in, DType out, const View& view, const Operands& operands, int64_t threads);                \
  void run(Op op, DType in, DType out, const View& view, const Operands& operands, void* scratch, bool second_phase, \
           int64_t first_unit, int64_t last_unit);                                                                   \
  }
JAX_SOFTMAX_DECLARE(plain)
#if defined(__x86_64__)
JAX_SOFTMAX_DECLARE(avx2)
JAX_SOFTMAX_DECLARE(avx512)
#endif
#undef JAX_SOFTMAX_DECLARE

const Variant kVariants[] = {
#if defined(__x86_64__)
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     },
     avx512::work, avx512::run},
    {"avx2",
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); },
     avx2::work, avx2::run},
#endif
    {"plain", [] { return true; }, plain::work, plain::run},
};
const int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

namespace {

const Variant* fastest() {
  const Variant* v = kVariants;
  while (!v->supported()) ++v;
  return v;
}

std::atomic<const Variant*>& chosen() {
  static std::atomic<const Variant*> variant{fastest()};
  return variant;
}

}  // namespace

const Variant& variant() { return *chosen().load(); }

void use(const Variant& variant) { chosen().store(&variant); }

}  // namespace jax_softmax::cpu
