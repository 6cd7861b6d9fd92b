// Loops in the threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include "xla/ffi/api/ffi.h"

namespace jax_softmax {

// A loop over [0, units) in ranges. The caller works too, and waits only for ranges that have begun: so it ends even if
// the pool, whose threads may all be waiting like the caller, never runs the tasks. A task that comes late finds no
// range left, and touches this object alone, which it shares.
class Ranges {
 public:
  Ranges(int64_t units, int64_t ranges) : units_(units), ranges_(ranges), left_(ranges) {}

  template <class Body>
  void work(const Body& body) {
    for (;;) {
      const int64_t range = next_.fetch_add(1);
      if (range >= ranges_) return;
      try {
        body(units_ * range / ranges_, units_ * (range + 1) / ranges_);
      } catch (...) {  // it must not leave a thread of the pool
        const std::lock_guard<std::mutex> lock(mutex_);
        thrown_ = std::current_exception();
      }
      if (left_.fetch_sub(1) == 1) {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  // Throws what a range has thrown.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return left_.load() == 0; });
    if (thrown_) std::rethrow_exception(thrown_);
  }

 private:
  const int64_t units_;
  const int64_t ranges_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> left_;
  std::mutex mutex_;
  std::condition_variable done_;
  std::exception_ptr thrown_;
};

// Calls body(begin, end) for ranges that make up [0, units), in up to so many threads, this one among them. Tasks have
// copies of the body.
template <class Body>
void for_ranges(xla::ffi::ThreadPool& pool, int64_t threads, int64_t units, int64_t ranges, const Body& body) {
  const auto loop = std::make_shared<Ranges>(units, ranges);
  try {
    for (int64_t i = 1; i < std::min(threads, ranges); ++i) pool.Schedule([loop, body] { loop->work(body); });
  } catch (const std::bad_alloc&) {
    // This thread does what there are no tasks for.
  }
  loop->work(body);
  loop->wait();
}

}  // namespace jax_softmax
