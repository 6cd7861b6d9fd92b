// Between plans and the driver: a GPU, and the launch of a kernel on it.
#pragma once

#include <cstdint>

namespace jax_softmax {

// What plans are made for.
struct Device {
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int shared_memory_per_block;  // bytes, opted in
  int largest_cluster;          // blocks; 1 where there are no clusters
};

struct Launch {
  int64_t blocks;
  int threads;               // of a block
  int cluster = 1;           // blocks that share memory
  int64_t shared_bytes = 0;  // dynamic shared memory of a block
  int resident = 0;          // blocks that a multiprocessor must have registers for; 0: the compiler decides
  bool cooperative = false;  // all blocks run at once
  bool overlaps = false;     // may start before the previous kernel has ended, which it waits for itself
};

}  // namespace jax_softmax
