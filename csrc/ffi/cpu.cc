#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <memory>
#include <new>

#include "cpu/cpu.h"
#include "ffi/custom_call.h"
#include "ffi/ranges.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

// Fewer elements are not worth another thread.
constexpr int64_t kElementsPerTask = 32 << 10;
// Several ranges a thread even out threads that start late or are slow.
constexpr int64_t kRangesPerThread = 4;

// Asks for huge pages under a large result. Its memory is most often new, and page faults of 4 KB take longer than the
// softmax. The system may ignore it.
void advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

constexpr std::align_val_t kScratchAlignment{cpu::kScratchAlignment};
struct FreesScratch {
  void operator()(void* scratch) const { ::operator delete(scratch, kScratchAlignment); }
};

ffi::Error run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Call call;
  Buffers buffers;
  if (ffi::Error error = read_operator(args, rets, attributes, &call, &buffers); error.failure()) return error;
  const DType out = call.out.empty() ? call.in : call.out[0];
  const bool fused =
      !call.load.empty() || !call.store.empty() || call.count(Role::kArray) + call.count(Role::kIndex) > 0;
  if (!facts_of(call.op).on_cpu || fused || !cpu::makes(call.in, out)) {
    return invalid(describe(call) + ": there is no CPU kernel");
  }
  View view;
  std::vector<SideStrides> strides;
  if (const std::string message = make_view(call, &view, &strides); !message.empty()) {
    return invalid(describe(call) + ": " + message);
  }
  const int64_t elements = view.elements();
  if (elements == 0) return ffi::Error::Success();

  cpu::Buffers pointers{};
  auto operand = buffers.in.begin(), result = buffers.out.begin();
  const Cost& cost = cost_of(call.op);
  for (int i = 0; i < cost.inputs; ++i) pointers.in[i] = *operand++;
  const void** number = pointers.numbers;
  for (size_t s = 0; s < call.sides.size(); ++s, ++operand) {
    if (call.sides[s].role == Role::kNumber) *number++ = *operand;
    if (call.sides[s].role == Role::kLabel) pointers.labels = static_cast<const int32_t*>(*operand);
    if (call.sides[s].role != Role::kMask) continue;
    pointers.mask = static_cast<const bool*>(*operand);
    pointers.mask_strides = strides[s];
  }
  if (cost.element_results) {
    pointers.out = *result++;
    advise_huge_pages(pointers.out, elements * bytes_of(out));
  }
  std::copy_n(result, cost.row_results, pointers.row_results);
  const cpu::Variant& variant = cpu::variant();
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const cpu::Work work = variant.work(call.op, call.in, out, view, pointers, threads);
  const int64_t ranges = std::min({work.units, elements / kElementsPerTask, threads * kRangesPerThread});
  const std::unique_ptr<void, FreesScratch> scratch(
      work.scratch_bytes > 0 ? ::operator new(work.scratch_bytes, kScratchAlignment) : nullptr);
  for (int phase = 0; phase < (scratch ? 2 : 1); ++phase) {
    const auto body = [&variant, op = call.op, in = call.in, out, view, pointers, scratch = scratch.get(), phase](
                          int64_t begin, int64_t end) {
      variant.run(op, in, out, view, pointers, scratch, phase == 1, begin, end);
    };
    if (threads == 1 || ranges < 2) {
      body(0, work.units);
    } else {
      for_ranges(pool, threads, work.units, ranges, body);
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kHandler, returning_errors(run),
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace

void* cpu_handler() { return reinterpret_cast<void*>(+kHandler); }

}  // namespace jax_softmax
