#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <nanobind/stl/optional.h>
#include <climits>
#include <optional>

#include "cpu/cpu.h"
#include "ffi.h"
#include "jit/jit.h"
#include "plan.h"

namespace nb = nanobind;
using namespace jax_softmax;

namespace {

template <size_t n>
int index_of(const char* const (&names)[n], const std::string& name, const char* argument) {
  for (size_t i = 0; i < n; ++i) {
    if (name == names[i]) return static_cast<int>(i);
  }
  throw nb::value_error((std::string("unknown ") + argument + ": " + name).c_str());
}

nb::list extents(const Dims& dims) {
  nb::list list;
  for (int i = 0; i < dims.size; ++i) list.append(nb::make_tuple(dims.dim[i].extent, dims.dim[i].stride));
  return list;
}

using Shape = std::optional<std::vector<int64_t>>;

Op op_of(const std::string& name) { return static_cast<Op>(index_of(kOpNames, name, "op")); }
DType dtype_of(const std::string& name) { return static_cast<DType>(index_of(kDTypeNames, name, "dtype")); }

View view_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& axes, const Shape& mask_shape) {
  if (mask_shape && mask_shape->size() != shape.size()) throw nb::value_error("the mask differs in rank");
  View view;
  const std::string error =
      make_view(shape.data(), mask_shape ? mask_shape->data() : nullptr, static_cast<int>(shape.size()), axes.data(),
                static_cast<int>(axes.size()), &view);
  if (!error.empty()) throw nb::value_error(error.c_str());
  return view;
}

nb::dict plan(const std::vector<int64_t>& shape, const std::vector<int64_t>& axes, const std::string& op,
              const std::string& dtype, const Shape& mask_shape, int compute_capability, int multiprocessors,
              int shared_memory_per_block, int largest_cluster, bool scratch) {
  const View view = view_of(shape, axes, mask_shape);
  const CudaPlan plan =
      make_cuda_plan(view, op_of(op), dtype_of(dtype), Alignment::kAligned,
                     {compute_capability, multiprocessors, shared_memory_per_block, largest_cluster}, scratch);
  nb::dict result;
  result["kept"] = extents(view.kept);
  result["reduced"] = extents(view.reduced);
  result["minor_reduced"] = view.minor_reduced;
  result["rows"] = view.rows;
  result["columns"] = view.columns;
  result["schedule"] = kScheduleNames[static_cast<int>(plan.schedule)];
  result["lanes"] = plan.lanes;
  result["packs"] = plan.packs;
  result["threads"] = plan.threads;
  result["blocks"] = plan.blocks;
  result["shared_bytes"] = plan.shared_bytes;
  result["cluster"] = plan.cluster;
  result["slab_rows"] = plan.slab_rows;
  result["chunks"] = plan.chunks;
  result["share"] = plan.share;
  result["stages"] = plan.stages;
  result["spare"] = plan.spare;
  result["boundary"] = plan.boundary;
  result["again"] = plan.again;
  result["scratch"] = plan.scratch;
  result["edges"] = kEdgesNames[static_cast<int>(plan.edges)];
  return result;
}

nb::dict build_info() {
  nb::list variants;
  for (int i = 0; i < cpu::kVariantCount; ++i) variants.append(cpu::kVariants[i].name);
  nb::dict info;
  info["version"] = JAX_SOFTMAX_VERSION;
  info["compiler"] = JAX_SOFTMAX_COMPILER;
  info["ffi_api"] = nb::make_tuple(JAX_SOFTMAX_FFI_MAJOR, JAX_SOFTMAX_FFI_MINOR);
  info["cpu_variants"] = variants;
  info["cpu_variant"] = cpu::variant().name;
  info["cuda"] = cuda_handler() != nullptr;
  info["cuda_version"] = JAX_SOFTMAX_CUDA_VERSION;
  info["cuda_architectures"] = JAX_SOFTMAX_CUDA_ARCHITECTURES;
  return info;
}

// ---- The run-time compiler

void raise_if(const jit::Error& error) {
  if (error) throw std::runtime_error(error.message);
}

template <class T>
T value_or_raise(jit::Result<T> result) {
  raise_if(result.error);
  return std::move(result.value);
}

nb::dict jit_facts() {
  const jit::Facts facts = value_or_raise(jit::facts());
  nb::dict dict;
  dict["nvrtc"] = jit::cuda_version(facts.nvrtc_version);
  dict["nvrtc_path"] = facts.nvrtc_path;
  dict["compiled"] = facts.compiled;
  dict["read"] = facts.read;
  dict["written"] = facts.written;
  dict["cache_folder"] = facts.cache_folder;
  dict["cache_entries"] = facts.cache.entries;
  dict["cache_bytes"] = facts.cache.bytes;
  return dict;
}

void bind_jit(nb::module_& m) {
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  m.def(
      "jit_configure",
      [](const std::string& nvrtc, const std::string& cache_folder, int64_t cache_bytes) {
        raise_if(jit::configure(nvrtc, cache_folder, cache_bytes));
      },
      nb::arg("nvrtc"), nb::arg("cache_folder"), nb::arg("cache_bytes"),
      "Loads NVRTC from this path; keeps compiled kernels in this folder (none if empty), up to so many bytes.");
  m.def(
      "driver_version", [] { return value_or_raise(jit::driver()).version; },
      "The newest CUDA that the driver supports, 12040 for 12.4; raises with the reason if there is no driver.");
  m.def("device_count", [] { return value_or_raise(jit::device_count()); });
  m.def("jit_stop", &jit::stop, NoGil(), "Waits for compiles under way and drops those not begun: call it at exit.");
  m.def("jit_facts", &jit_facts);
  m.def(
      "jit_prepare",
      [](const std::string& code, const std::string& plan, int compute_capability) {
        jit::prepare({code, plan}, compute_capability);
      },
      nb::arg("code"), nb::arg("plan"), nb::arg("compute_capability"));
  m.def(
      "jit_binary",
      [](const std::string& code, const std::string& plan, int compute_capability) {
        jit::Result<std::string> binary = [&] {
          const nb::gil_scoped_release released;
          return jit::binary({code, plan}, compute_capability);
        }();
        const std::string bytes = value_or_raise(std::move(binary));
        return nb::bytes(bytes.data(), bytes.size());
      },
      nb::arg("code"), nb::arg("plan"), nb::arg("compute_capability"));
  m.def(
      "jit_resources",
      [](const std::string& code, const std::string& plan, int compute_capability) {
        return value_or_raise(jit::resources({code, plan}, compute_capability));
      },
      nb::arg("code"), nb::arg("plan"), nb::arg("compute_capability"), NoGil(),
      "What the assembler says of a kernel's registers and spills.");
  m.def(
      "jit_load",
      [](const std::string& code, const std::string& plan, int ordinal) {
        raise_if(jit::get({code, plan}, ordinal).error);
      },
      nb::arg("code"), nb::arg("plan"), nb::arg("ordinal"), NoGil());
}

}  // namespace

NB_MODULE(_kernels, m) {
  bind_jit(m);
  m.doc() = "The compiled kernels of jax_softmax: FFI handlers, the plan, and what was built.";
  m.attr("MAX_DIMS") = kMaxDims;
  m.def("cpu_handler", [] { return nb::capsule(cpu_handler()); });
  m.def("cuda_handler", []() -> std::optional<nb::capsule> {
    if (void* handler = cuda_handler()) return nb::capsule(handler);
    return std::nullopt;
  });
  m.def("build_info", &build_info);
  m.def(
      "limit_cuda_device", &limit_cuda_device, nb::arg("shared_memory_per_block") = INT_MAX,
      nb::arg("largest_cluster") = INT_MAX,
      "Has CUDA plans made as if every device had no more than this; for tests. Without arguments, lifts the limits.");
  m.def("plan", &plan, nb::arg("shape"), nb::arg("axes"), nb::arg("op"), nb::arg("dtype"),
        nb::arg("mask_shape").none() = nb::none(), nb::arg("compute_capability") = 90, nb::arg("multiprocessors") = 132,
        nb::arg("shared_memory_per_block") = 227 * 1024, nb::arg("largest_cluster") = 16, nb::arg("scratch") = true);
  m.def(
      "scratch_bytes",
      [](const std::vector<int64_t>& shape, const std::vector<int64_t>& axes, const std::string& op,
         const std::string& dtype, const Shape& mask_shape) {
        return scratch_bytes(view_of(shape, axes, mask_shape), op_of(op), dtype_of(dtype));
      },
      nb::arg("shape"), nb::arg("axes"), nb::arg("op"), nb::arg("dtype"), nb::arg("mask_shape").none() = nb::none());
}
