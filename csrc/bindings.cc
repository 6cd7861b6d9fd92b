#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <iterator>
#include <optional>
#include <stdexcept>

#include "attention/geometry.h"
#include "cpu/cpu.h"
#include "ffi/cuda.h"
#include "jit/jit.h"

namespace nb = nanobind;
using namespace jax_softmax;

namespace {

// ---- Plans

// Shapes and dtypes.
using Arrays = std::vector<std::pair<std::vector<int64_t>, std::string>>;

std::vector<Array> arrays_of(const Arrays& shapes_and_dtypes) {
  std::vector<Array> arrays;
  for (const auto& [shape, name] : shapes_and_dtypes) {
    const auto known = std::find(std::begin(kDTypeNames), std::end(kDTypeNames), name);
    if (known == std::end(kDTypeNames)) throw nb::value_error(("unknown dtype: " + name).c_str());
    arrays.push_back({static_cast<DType>(known - std::begin(kDTypeNames)), shape});
  }
  return arrays;
}

// The call that a custom call with these operands, results and attributes makes.
Call call_of(const Arrays& operands, const Arrays& results, const nb::dict& attributes) {
  const auto text = [&](const char* name) { return nb::cast<std::string_view>(attributes[name]); };
  const Attributes values{text("op"), nb::cast<std::vector<int64_t>>(attributes["axes"]), text("sides"), text("load"),
                          text("store")};
  Call call;
  const std::string message = read_call(values, arrays_of(operands), arrays_of(results), &call);
  if (!message.empty()) throw nb::value_error(message.c_str());
  return call;
}

Problem checked_problem(const Call& call) {
  Problem problem;
  if (const std::string message = problem_of(call, &problem); !message.empty()) throw nb::value_error(message.c_str());
  return problem;
}

nb::dict operators() {
  nb::dict table;
  for (const OperatorFacts& op : kOperators) {
    nb::dict row;
    row["inputs"] = op.cost.inputs;
    row["element_results"] = static_cast<int>(op.cost.element_results);
    row["row_results"] = op.cost.row_results;
    row["row_numbers"] = op.cost.row_numbers;
    row["labelled"] = op.cost.labelled;
    row["on_cpu"] = op.on_cpu;
    row["quantizes"] = op.quantizes;
    row["sums"] = op.cost.sums;
    row["logarithms"] = op.cost.logarithms;
    table[op.name] = row;
  }
  return table;
}

nb::list extents(const Dims& dims) {
  nb::list list;
  for (int i = 0; i < dims.size; ++i) list.append(nb::make_tuple(dims.dim[i].extent, dims.dim[i].stride));
  return list;
}

nb::object plan(const Arrays& operands, const Arrays& results, const nb::dict& attributes, int compute_capability,
                int multiprocessors, int shared_memory_per_block, int largest_cluster, bool sources) {
  const Call call = call_of(operands, results, attributes);
  const Problem problem = checked_problem(call);
  const Device device{compute_capability, multiprocessors, shared_memory_per_block, largest_cluster};
  const std::optional<Plan> plan = make_plan(problem, device);
  if (!plan) return nb::none();
  const View& view = problem.view;
  nb::dict result, fields;
  std::visit([&](const auto& p) { p.each([&](const char* name, auto value) { fields[name] = value; }); }, *plan);
  result["schedule"] = kScheduleNames[plan->index()];
  result["fields"] = fields;
  result["scratch_bytes"] = scratch_bytes(*plan, problem);
  result["batch"] = extents(view.batch);
  result["reduced"] = extents(view.reduced);
  result["aligned"] = boundary_of(view, kPackBytes, problem.footprint) == 0;
  if (!sources) return result;
  const Planned planned = *plan_call(call, problem, device);
  nb::list steps;
  for (const PlannedStep& step : planned.steps) {
    nb::dict entry;
    entry["code"] = step.source.code;
    entry["plan"] = step.source.plan;
    entry["blocks"] = step.launch.blocks;
    entry["threads"] = step.launch.threads;
    entry["cluster"] = step.launch.cluster;
    entry["shared_bytes"] = step.launch.shared_bytes;
    entry["cooperative"] = step.launch.cooperative;
    entry["overlap"] = step.launch.overlaps;
    steps.append(entry);
  }
  result["steps"] = steps;
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
  return info;
}

void use_cpu_variant(const std::string& name) {
  for (int i = 0; i < cpu::kVariantCount; ++i) {
    const cpu::Variant& variant = cpu::kVariants[i];
    if (name != variant.name) continue;
    if (!variant.supported()) throw nb::value_error(("this processor does not support " + name).c_str());
    return cpu::select(variant);
  }
  throw nb::value_error(("no CPU kernels were compiled for " + name).c_str());
}

// ---- Attention

nb::dict attention_tiling(const std::string& kernel, int features, int value_features) {
  using namespace attention;
  int which = 0;
  while (which < kKernels && kernel != kKernelNames[which]) ++which;
  if (which == kKernels || features > kMostFeatures || value_features > kMostFeatures) {
    throw nb::value_error("no such kernel of attention");
  }
  const Tiling tiling = tiling_of(KernelKind(which), features, value_features);
  nb::dict result;
  result["warps"] = tiling.warps;
  result["fragments"] = tiling.fragments;
  result["step"] = tiling.step;
  result["parts"] = tiling.parts;
  result["resident"] = tiling.resident;
  result["rows"] = tiling.rows();
  result["threads"] = tiling.threads();
  result["shared_bytes"] = shared_bytes(KernelKind(which), features, value_features);
  result["free_bytes"] = kMostSharedBytes - shared_bytes(KernelKind(which), features, value_features);
  nb::dict sides;
  for (const int bytes : {1, 2, 4}) sides[nb::int_(bytes)] = kStages * bytes_of_side(KernelKind(which), tiling, bytes);
  result["bytes_of_sides"] = sides;  // by the bytes of an element
  return result;
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
          return jit::get_binary({code, plan}, compute_capability);
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
  m.def("attention_handlers", [] {
    nb::dict handlers;
    handlers["initialize"] = nb::capsule(attention_initialize_handler());
    handlers["execute"] = nb::capsule(attention_execute_handler());
    return handlers;
  });
  m.def("attention_tiling", &attention_tiling, nb::arg("kernel"), nb::arg("features"), nb::arg("value_features"),
        "How a kernel of attention divides queries and keys into tiles: see csrc/attention/geometry.h.");
  m.def("build_info", &build_info);
  m.def("use_cpu_variant", &use_cpu_variant, nb::arg("name"),
        "Has the CPU kernels of this instruction set run from now on; for tests.");
  m.def(
      "limit_devices", &limit_devices, nb::arg("shared_memory_per_block") = INT_MAX,
      nb::arg("largest_cluster") = INT_MAX,
      "Has CUDA plans made as if every device had no more than this; for tests. Without arguments, lifts the limits.");
  m.def(
      "plan", &plan, nb::arg("operands"), nb::arg("results"), nb::arg("attributes"), nb::arg("compute_capability") = 90,
      nb::arg("multiprocessors") = 132, nb::arg("shared_memory_per_block") = 227 * 1024,
      nb::arg("largest_cluster") = 16, nb::arg("sources") = true,
      "The plan of a call, how its rows lie in memory, and its kernels. `operands` and `results`: shapes and dtypes.");
  m.def("devices_here", &devices_here, "The GPUs: of each the four numbers that `plan` takes.");
  bind_jit(m);
}
