#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <optional>
#include <stdexcept>

#include "cpu/cpu.h"
#include "ffi/cuda.h"
#include "jit/jit.h"

namespace nb = nanobind;
using namespace jax_softmax;

namespace {

// ---- Plans

using Shape = std::optional<std::vector<int64_t>>;

Op known_op(const std::string& name) {
  if (const std::optional<Op> op = op_of(name)) return *op;
  throw nb::value_error(("unknown op: " + name).c_str());
}

DType dtype_of(const std::string& name) {
  for (int i = 0; i < kDTypes; ++i) {
    if (name == kDTypeNames[i]) return static_cast<DType>(i);
  }
  throw nb::value_error(("unknown dtype: " + name).c_str());
}

// Of the arrays and indices that expressions read: shapes, and dtypes or "index".
using Sides = std::vector<std::pair<std::vector<int64_t>, std::string>>;

Call call_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& axes, const std::string& op,
             const std::string& dtype, const Shape& mask_shape, const std::optional<std::string>& out_dtype,
             const std::vector<std::string>& more_results, const std::string& load, const std::string& store,
             const Sides& sides) {
  Call call{};
  call.op = known_op(op);
  call.in = dtype_of(dtype);
  call.shape = shape;
  call.axes = axes;
  call.load = load;
  call.store = store;
  const Cost& cost = cost_of(call.op);
  if (cost.element_results) call.out.push_back(out_dtype ? dtype_of(*out_dtype) : call.in);
  for (const std::string& result : more_results) call.out.push_back(dtype_of(result));
  for (const auto& [side_shape, side_dtype] : sides) {
    const bool index = side_dtype == "index";
    call.sides.push_back({index ? Role::kIndex : Role::kArray, index ? DType::kI32 : dtype_of(side_dtype), side_shape});
  }
  for (int k = 0; k < cost.row_numbers; ++k) {
    call.sides.push_back({Role::kNumber, arithmetic_of(call), call.shape_of_rows()});
  }
  if (cost.labelled) call.sides.push_back({Role::kLabel, DType::kI32, call.shape_of_rows()});
  if (mask_shape) call.sides.push_back({Role::kMask, DType::kBool, *mask_shape});
  return call;
}

Problem checked_problem(const Call& call) {
  Problem problem;
  if (const std::string message = problem_of(call, &problem); !message.empty()) throw nb::value_error(message.c_str());
  return problem;
}

nb::dict operators() {
  nb::dict table;
  for (const Operator& op : kOperators) {
    nb::dict row;
    row["inputs"] = op.cost.inputs;
    row["element_results"] = static_cast<int>(op.cost.element_results);
    row["row_results"] = op.cost.row_results;
    row["row_numbers"] = op.cost.row_numbers;
    row["labelled"] = op.cost.labelled;
    row["on_cpu"] = op.on_cpu;
    row["quantizes"] = op.quantizes;
    row["sums"] = op.cost.sums;
    table[op.name] = row;
  }
  return table;
}

nb::list extents(const Dims& dims) {
  nb::list list;
  for (int i = 0; i < dims.size; ++i) list.append(nb::make_tuple(dims.dim[i].extent, dims.dim[i].stride));
  return list;
}

nb::object plan(const std::vector<int64_t>& shape, const std::vector<int64_t>& axes, const std::string& op,
                const std::string& dtype, const Shape& mask_shape, int compute_capability, int multiprocessors,
                int shared_memory_per_block, int largest_cluster, const std::optional<std::string>& out_dtype,
                const std::vector<std::string>& more_results, const std::string& load, const std::string& store,
                const Sides& sides) {
  const Call call = call_of(shape, axes, op, dtype, mask_shape, out_dtype, more_results, load, store, sides);
  const Problem problem = checked_problem(call);
  const Device device{compute_capability, multiprocessors, shared_memory_per_block, largest_cluster};
  const std::optional<Planned> planned = plan_call(call, problem, device);
  if (!planned) return nb::none();
  nb::dict fields;
  std::visit([&](const auto& p) { p.each([&](const char* name, auto value) { fields[name] = value; }); },
             planned->plan);
  nb::list steps;
  for (const PlannedStep& step : planned->steps) {
    nb::dict entry;
    entry["code"] = step.source.code;
    entry["plan"] = step.source.plan;
    entry["blocks"] = step.launch.blocks;
    entry["threads"] = step.launch.threads;
    entry["cluster"] = step.launch.cluster;
    entry["shared_bytes"] = step.launch.shared_bytes;
    entry["cooperative"] = step.launch.cooperative;
    entry["overlap"] = step.launch.overlap;
    steps.append(entry);
  }
  nb::dict result;
  result["schedule"] = kScheduleNames[planned->plan.index()];
  result["fields"] = fields;
  result["steps"] = steps;
  result["scratch_bytes"] = planned->scratch_bytes;
  result["faster_than_xla"] = faster_than_xla(planned->plan, problem);
  result["kept"] = extents(problem.view.kept);
  result["reduced"] = extents(problem.view.reduced);
  return result;
}

std::optional<int64_t> lower(const std::vector<int64_t>& shape, const std::vector<int64_t>& axes, const std::string& op,
                             const std::string& dtype, const Shape& mask_shape,
                             const std::optional<std::string>& out_dtype, const std::vector<std::string>& more_results,
                             const std::string& load, const std::string& store, const Sides& sides) {
  const Call call = call_of(shape, axes, op, dtype, mask_shape, out_dtype, more_results, load, store, sides);
  return lower_for_cuda(call, checked_problem(call));
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
  return info;
}

void use_cpu_variant(const std::string& name) {
  for (int i = 0; i < cpu::kVariantCount; ++i) {
    const cpu::Variant& variant = cpu::kVariants[i];
    if (name != variant.name) continue;
    if (!variant.supported()) throw nb::value_error(("this processor does not support " + name).c_str());
    return cpu::use(variant);
  }
  throw nb::value_error(("no CPU kernels were compiled for " + name).c_str());
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
  dict["cache_unsafe"] = facts.cache.unsafe;
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
        jit::Result<jit::Nvrtc::Compiled> compiled = [&] {
          const nb::gil_scoped_release released;
          return jit::compiled({code, plan}, compute_capability);
        }();
        const auto [binary, log] = value_or_raise(std::move(compiled));
        return nb::make_tuple(nb::bytes(binary.data(), binary.size()), log);
      },
      nb::arg("code"), nb::arg("plan"), nb::arg("compute_capability"),
      "A kernel's binary, and what the assembler says of its registers and spills if it was compiled just now.");
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "The compiled part of jax_softmax: FFI handlers, plans, the run-time compiler, and what was built.";
  m.attr("MAX_DIMS") = kMaxDims;
  m.attr("CALL_VERSION") = kCallVersion;
  m.attr("OPERATORS") = operators();  // by name, as the CPU and CUDA kernels know them
  m.def("cpu_handler", [] { return nb::capsule(cpu_handler()); });
  m.def("cuda_handlers", [] {
    nb::dict handlers;
    handlers["initialize"] = nb::capsule(cuda_initialize_handler());
    handlers["execute"] = nb::capsule(cuda_execute_handler());
    return handlers;
  });
  m.def("build_info", &build_info);
  m.def("use_cpu_variant", &use_cpu_variant, nb::arg("name"),
        "Has the CPU kernels of this instruction set run from now on; for tests.");
  m.def(
      "limit_devices", &limit_devices, nb::arg("shared_memory_per_block") = INT_MAX,
      nb::arg("largest_cluster") = INT_MAX,
      "Has CUDA plans made as if every device had no more than this; for tests. Without arguments, lifts the limits.");
  m.def("plan", &plan, nb::arg("shape"), nb::arg("axes"), nb::arg("op"), nb::arg("dtype"),
        nb::arg("mask_shape").none() = nb::none(), nb::arg("compute_capability") = 90, nb::arg("multiprocessors") = 132,
        nb::arg("shared_memory_per_block") = 227 * 1024, nb::arg("largest_cluster") = 16,
        nb::arg("out_dtype").none() = nb::none(), nb::arg("more_results") = std::vector<std::string>(),
        nb::arg("load") = "", nb::arg("store") = "", nb::arg("sides") = Sides(),
        "The plan of a call and the source of its kernels. `sides`: shapes, of the operand's rank, and dtypes of the "
        "arrays that expressions read; or \"index\", of an index. `more_results`: dtypes of those after the first.");
  m.def("lower_for_cuda", &lower, nb::arg("shape"), nb::arg("axes"), nb::arg("op"), nb::arg("dtype"),
        nb::arg("mask_shape").none() = nb::none(), nb::arg("out_dtype").none() = nb::none(),
        nb::arg("more_results") = std::vector<std::string>(), nb::arg("load") = "", nb::arg("store") = "",
        nb::arg("sides") = Sides(),
        "The bytes that a call on CUDA may need to work with, or None if XLA itself is as fast. Begins to make its "
        "kernels.");
  bind_jit(m);
}
