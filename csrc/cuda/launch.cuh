// From a plan to the kernel that it names, for one operator and one storage type.
#pragma once

#include <type_traits>

#include "cuda/cuda.h"
#include "cuda/rows.cuh"
#include "cuda/strided.cuh"

namespace jax_softmax::cuda {

template <class Args>
cudaError_t enqueue(void (*kernel)(Args), const Args& args, const CudaPlan& plan, cudaStream_t stream) {
  if (plan.shared_bytes > 48 << 10) {
    const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    if (status != cudaSuccess) return status;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// Kernels are picked from the plan's run-time numbers by trying each number that is compiled in; cudaErrorInvalidValue
// means that the plan asks for one that is not.
template <class A, int kLanes, int kPacks>
cudaError_t enqueue_lanes(const CudaPlan& plan, const RowArgs<A>& args, cudaStream_t stream) {
  if constexpr (!A::kMasked) {
    if (plan.exact) return enqueue(rows_in_lanes<A, kLanes, kPacks, true>, args, plan, stream);
  }
  return enqueue(rows_in_lanes<A, kLanes, kPacks, false>, args, plan, stream);
}

template <class A, int kPacks>
cudaError_t enqueue_block(const CudaPlan& plan, const RowArgs<A>& args, cudaStream_t stream) {
  if constexpr (!A::kMasked) {
    if (plan.exact) return enqueue(rows_in_block<A, kPacks, true>, args, plan, stream);
  }
  return enqueue(rows_in_block<A, kPacks, false>, args, plan, stream);
}

template <class A>
cudaError_t launch_with(const CudaPlan& plan, const View& view, const A& access, cudaStream_t stream) {
  const RowArgs<A> rows{access, view.kept, view.rows, view.columns, view.reduced.dim[view.reduced.size - 1].mask_stride};
  const ViewArgs<A> any{access, view};
  switch (plan.schedule) {
    case Schedule::kLanes:
      switch (plan.lanes * 100 + plan.packs) {
        case 101:
          return enqueue_lanes<A, 1, 1>(plan, rows, stream);
        case 201:
          return enqueue_lanes<A, 2, 1>(plan, rows, stream);
        case 401:
          return enqueue_lanes<A, 4, 1>(plan, rows, stream);
        case 801:
          return enqueue_lanes<A, 8, 1>(plan, rows, stream);
        case 1601:
          return enqueue_lanes<A, 16, 1>(plan, rows, stream);
        case 3201:
          return enqueue_lanes<A, 32, 1>(plan, rows, stream);
        case 3202:
          return enqueue_lanes<A, 32, 2>(plan, rows, stream);
        case 3204:
          return enqueue_lanes<A, 32, 4>(plan, rows, stream);
        case 3208:
          return enqueue_lanes<A, 32, 8>(plan, rows, stream);
      }
      return cudaErrorInvalidValue;
    case Schedule::kBlock:
      switch (plan.packs) {
        case 4:
          return enqueue_block<A, 4>(plan, rows, stream);
        case 8:
          return enqueue_block<A, 8>(plan, rows, stream);
      }
      return cudaErrorInvalidValue;
    case Schedule::kShared:
      return enqueue(rows_in_turns<A, true>, rows, plan, stream);
    case Schedule::kStream:
      return enqueue(rows_in_turns<A, false>, rows, plan, stream);
    case Schedule::kGather:
      return enqueue(gathered_rows<A>, any, plan, stream);
    case Schedule::kColumns:
      return enqueue(columns_side_by_side<A>, any, plan, stream);
  }
  return cudaErrorInvalidValue;
}

template <template <class> class OpOf, class T, bool kMasked>
cudaError_t launch_masked(const CudaPlan& plan, const View& view, const Operands& operands, cudaStream_t stream) {
  using Operator = OpOf<typename Policy<T>::type>;
  Access<Operator, T, kMasked> access;
  for (int k = 0; k < Operator::kInputs; ++k) access.in[k] = static_cast<const T*>(operands.in[k]);
  access.mask = operands.mask;
  access.out = static_cast<T*>(operands.out);
  access.elements = view.rows * view.columns;
  return launch_with(plan, view, access, stream);
}

template <DType dtype>
struct Storage;
template <>
struct Storage<DType::kF16> {
  using type = __half;
};
template <>
struct Storage<DType::kBF16> {
  using type = __nv_bfloat16;
};
template <>
struct Storage<DType::kF32> {
  using type = float;
};
template <>
struct Storage<DType::kF64> {
  using type = double;
};

template <Op op, DType dtype>
cudaError_t launch_plan(const CudaPlan& plan, const View& view, const Operands& operands, cudaStream_t stream) {
  using T = typename Storage<dtype>::type;
  const auto launch = [&](auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    if constexpr (op == Op::kSoftmax) {
      return launch_masked<Softmax, T, kMasked>(plan, view, operands, stream);
    } else if constexpr (op == Op::kLogSoftmax) {
      return launch_masked<LogSoftmax, T, kMasked>(plan, view, operands, stream);
    } else if constexpr (op == Op::kSoftmaxLinear) {
      return launch_masked<SoftmaxLinear, T, kMasked>(plan, view, operands, stream);
    } else if constexpr (op == Op::kLogSoftmaxJvp) {
      return launch_masked<LogSoftmaxJvp, T, kMasked>(plan, view, operands, stream);
    } else {
      return launch_masked<LogSoftmaxVjp, T, kMasked>(plan, view, operands, stream);
    }
  };
  return view.masked ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace jax_softmax::cuda
