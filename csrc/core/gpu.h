// Between plans and the driver: a GPU, and a kernel for it with its launch.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace jax_softmax {

// What plans are made for.
struct Device {
  int compute_capability;  // 10 * major + minor
  int multiprocessors;
  int shared_memory_per_block;  // bytes, opted in
  int largest_cluster;          // blocks; 1 where there are no clusters
};

// A tensor map of an array of 16 bits: its extents, and how many of each a copy takes, innermost first.
struct MappedArray {
  std::array<uint64_t, 5> extents;
  std::array<uint32_t, 5> box;
};

struct Launch {
  int64_t blocks;
  int threads;                         // of a block
  int cluster = 1;                     // blocks that share memory
  int64_t shared_bytes = 0;            // dynamic shared memory of a block
  int resident = 0;                    // blocks that a multiprocessor must have registers for; 0: the compiler decides
  bool cooperative = false;            // all blocks run at once
  bool overlaps = false;               // may start before the previous kernel has ended, which it waits for itself
  std::vector<MappedArray> maps = {};  // of the first operands, which are given to the kernel before the addresses
};

// A kernel's source.
namespace jit {
struct Source {
  std::string code;  // includes embedded headers by name and defines one `extern "C" __global__ void kernel(...)`
  std::string plan;  // one line that describes it, for messages
};
}  // namespace jit

// A kernel with its launch: by the name of a function in device/, by its source, or loaded.
template <class Kernel>
struct Step {
  Kernel kernel;
  Launch launch;
  int64_t rows = 0;  // Operands::rows
};

}  // namespace jax_softmax
