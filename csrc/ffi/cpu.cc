#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include "core/make_view.h"
#include "cpu/cpu.h"
#include "ffi/call.h"

namespace jax_softmax {

namespace ffi = xla::ffi;

namespace {

// Fewer elements than this are not worth another thread.
constexpr int64_t kElementsPerTask = 32 << 10;
// Ranges a thread takes in turn, so that an uneven start or a slow thread evens out.
constexpr int64_t kRangesPerThread = 4;

// A loop over [0, units) in ranges. The caller works too and waits only for ranges that somebody has begun, so that it
// ends even if the pool, all of whose threads may be waiting like this one, never runs the tasks. Those that come late
// find nothing left and touch nothing but this object, which they own a share of.
class Loop {
 public:
  Loop(int64_t units, int64_t ranges) : units_(units), ranges_(ranges), left_(ranges) {}

  template <class Body>
  void work(const Body& body) {
    for (;;) {
      const int64_t range = next_.fetch_add(1);
      if (range >= ranges_) return;
      body(units_ * range / ranges_, units_ * (range + 1) / ranges_);
      if (left_.fetch_sub(1) == 1) {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return left_.load() == 0; });
  }

 private:
  const int64_t units_;
  const int64_t ranges_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> left_;
  std::mutex mutex_;
  std::condition_variable done_;
};

// Asks for huge pages under a large result. Its memory is most often new, and to be given it 4 KB at a time takes
// longer than the softmax. Advice only: whether it is taken makes no difference to the contents.
void advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

ffi::Error run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  Call call;
  CallBuffers buffers;
  if (ffi::Error error = read_call(args, rets, attributes, &call, &buffers); error.failure()) return error;
  const DType out = call.out.empty() ? call.in : call.out[0];
  const Cost& cost = cost_of(call.op);
  const int given = call.rows_given ? cost.row_results : 0;
  const size_t of_rows = given + cost.row_numbers + cost.labelled;  // come first among the sides
  const bool fused = !call.load.empty() || !call.store.empty() || call.sides.size() > of_rows + call.masked();
  if (!facts_of(call.op).on_cpu || fused || !cpu::makes(call.in, out)) {
    return ffi::Error::InvalidArgument("jax_softmax: " + describe(call) + ": there is no CPU kernel");
  }
  View view;
  std::vector<Strides> strides;
  std::vector<std::vector<int64_t>> masks;
  if (call.masked()) masks.push_back(call.sides.back().shape);
  if (const std::string message = make_view(call.shape, masks, call.axes, &view, &strides); !message.empty()) {
    return ffi::Error::InvalidArgument("jax_softmax: " + describe(call) + ": " + message);
  }
  const int64_t elements = view.elements();
  if (elements == 0) return ffi::Error::Success();

  cpu::Operands operands{};
  std::copy(buffers.in.begin(), buffers.in.end(), operands.in);
  std::copy_n(buffers.side.begin(), given, operands.given);
  std::copy_n(buffers.side.begin() + given, cost.row_numbers, operands.numbers);
  if (cost.labelled) operands.labels = static_cast<const int32_t*>(buffers.side[given + cost.row_numbers]);
  if (call.masked()) {
    operands.mask = static_cast<const bool*>(buffers.side[of_rows]);
    operands.mask_strides = strides[0];
  }
  if (!buffers.out.empty()) {
    operands.out = buffers.out[0];
    advise_huge_pages(operands.out, elements * bytes_of(out));
  }
  std::copy(buffers.of_rows.begin(), buffers.of_rows.end(), operands.of_rows);
  const cpu::Variant& variant = cpu::variant_for(call.in);
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const cpu::Work work = variant.work(call.op, call.in, out, view, operands, threads);
  const int64_t ranges = std::min({work.units, elements / kElementsPerTask, threads * kRangesPerThread});
  constexpr std::align_val_t kAlignment{cpu::kScratchAlignment};
  void* const scratch = work.scratch_bytes > 0 ? ::operator new(work.scratch_bytes, kAlignment) : nullptr;
  for (int phase = 0; phase < (scratch ? 2 : 1); ++phase) {
    const auto body = [&variant, op = call.op, in = call.in, out, view, operands, scratch, phase](int64_t begin,
                                                                                                  int64_t end) {
      variant.run(op, in, out, view, operands, scratch, phase == 1, begin, end);
    };
    if (threads == 1 || ranges < 2) {
      body(0, work.units);
      continue;
    }
    const auto loop = std::make_shared<Loop>(work.units, ranges);
    for (int64_t i = 1; i < std::min(threads, ranges); ++i) {
      pool.Schedule([loop, body] { loop->work(body); });
    }
    loop->work(body);
    loop->wait();
  }
  ::operator delete(scratch, kAlignment);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kHandler, run, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace

void* cpu_handler() { return reinterpret_cast<void*>(+kHandler); }

}  // namespace jax_softmax
