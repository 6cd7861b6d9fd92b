#include "cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>

namespace jax_softmax::cpu {

#define JAX_SOFTMAX_DECLARE(isa)                                                                                   \
  namespace isa {                                                                                                  \
  Work work(Op op, DType in, DType out, const View& view, const Buffers& buffers, int64_t threads);                \
  void run(Op op, DType in, DType out, const View& view, const Buffers& buffers, void* scratch, bool second_phase, \
           int64_t first_unit, int64_t last_unit);                                                                 \
  }
JAX_SOFTMAX_DECLARE(plain)
#if defined(__x86_64__)
JAX_SOFTMAX_DECLARE(avx2)
JAX_SOFTMAX_DECLARE(avx512)
#endif
#undef JAX_SOFTMAX_DECLARE

#if defined(__x86_64__)
namespace {

// The compilers' own question, __builtin_cpu_supports, zig's runtime library answers with no.
bool has_registers(unsigned states) {  // that the operating system saves
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & states) == states;
}
bool has_features(unsigned of_leaf_1, unsigned of_leaf_7) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & of_leaf_1) != of_leaf_1) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & of_leaf_7) == of_leaf_7;
}
bool has_avx2() { return has_registers(0x06) && has_features(bit_FMA | bit_F16C, bit_AVX2); }
bool has_avx512() {
  return has_avx2() && has_registers(0xe6) && has_features(0, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
}

}  // namespace
#endif

const Variant kVariants[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, avx512::work, avx512::run},
    {"avx2", has_avx2, avx2::work, avx2::run},
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

void select(const Variant& variant) { chosen().store(&variant); }

}  // namespace jax_softmax::cpu
