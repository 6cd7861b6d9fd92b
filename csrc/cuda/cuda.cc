#include "cuda/cuda.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <utility>

namespace jax_softmax::cuda {

namespace {

using Launcher = cudaError_t (*)(const CudaPlan&, const View&, const Operands&, cudaStream_t);

template <int... index>
constexpr std::array<Launcher, sizeof...(index)> make_launchers(std::integer_sequence<int, index...>) {
  return {launch_plan<static_cast<Op>(index / kDTypes), static_cast<DType>(index % kDTypes)>...};
}

constexpr auto kLaunchers = make_launchers(std::make_integer_sequence<int, kOps * kDTypes>());

Alignment alignment_of(Op op, const Operands& operands) {
  const auto offset = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  for (int k = 0; k < inputs_of(op); ++k) {
    if (offset(operands.in[k]) != offset(operands.out)) return Alignment::kMixed;
  }
  return offset(operands.out) == 0 ? Alignment::kAligned : Alignment::kAlike;
}

std::atomic<int> most_shared_memory{INT_MAX}, most_blocks{INT_MAX};

cudaError_t current_device(Device* device) {
  int id, major, minor;
  cudaError_t status = cudaGetDevice(&id);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, id);
  };
  get(&major, cudaDevAttrComputeCapabilityMajor);
  get(&minor, cudaDevAttrComputeCapabilityMinor);
  get(&device->multiprocessors, cudaDevAttrMultiProcessorCount);
  get(&device->shared_memory_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device->compute_capability = 10 * major + minor;
  // 16 blocks are beyond what every chip with clusters can do, but these two can.
  const bool data_center = major == 9 || device->compute_capability == 100;
  device->largest_cluster = std::min(major < 9 ? 1 : data_center ? 16 : 8, most_blocks.load());
  device->shared_memory_per_block = std::min(device->shared_memory_per_block, most_shared_memory.load());
  return status;
}

}  // namespace

void limit_device(int shared_memory_per_block, int largest_cluster) {
  most_shared_memory = shared_memory_per_block;
  most_blocks = largest_cluster;
}

cudaError_t launch(Op op, DType dtype, const View& view, const Operands& operands, cudaStream_t stream) {
  Device device;
  if (const cudaError_t status = current_device(&device); status != cudaSuccess) return status;
  const CudaPlan plan =
      make_cuda_plan(view, op, dtype, alignment_of(op, operands), device, operands.scratch != nullptr);
  return kLaunchers[static_cast<int>(op) * kDTypes + static_cast<int>(dtype)](plan, view, operands, stream);
}

}  // namespace jax_softmax::cuda
