#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
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
#include <tuple>

#include "cpu/cpu.h"
#include "ffi/cuda.h"
#include "jit/jit.h"
#include "plan/attention.h"
#include "plan/plan.h"

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

// The custom call with these operands, results and attributes.
template <class Call>
Call call_of(const Arrays& operands, const Arrays& results, const nb::dict& attributes) {
  Call call;
  call.operands = arrays_of(operands);
  call.results = arrays_of(results);
  Call::each(call,
             [&](const char* name, auto& value) { value = nb::cast<std::decay_t<decltype(value)>>(attributes[name]); });
  return call;
}

void raise_if_wrong(const std::string& message) {
  if (!message.empty()) throw nb::value_error(message.c_str());
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

nb::dict step_of(const Step<jit::Source>& step) {
  nb::dict entry;
  entry["code"] = step.kernel.code;
  entry["plan"] = step.kernel.plan;
  entry["blocks"] = step.launch.blocks;
  entry["threads"] = step.launch.threads;
  entry["cluster"] = step.launch.cluster;
  entry["shared_bytes"] = step.launch.shared_bytes;
  entry["cooperative"] = step.launch.cooperative;
  entry["overlap"] = step.launch.overlaps;
  nb::list maps;
  for (const MappedArray& map : step.launch.maps) maps.append(nb::make_tuple(map.extents, map.box));
  entry["maps"] = maps;
  return entry;
}

std::optional<nb::dict> plan(const Arrays& operands, const Arrays& results, const nb::dict& attributes,
                             int compute_capability, int multiprocessors, int shared_memory_per_block,
                             int largest_cluster, bool sources) {
  Call call = call_of<Call>(operands, results, attributes);
  Problem problem;
  raise_if_wrong(read_call(&call));
  raise_if_wrong(problem_of(call, &problem));
  const Device device{compute_capability, multiprocessors, shared_memory_per_block, largest_cluster};
  const std::optional<Plan> plan = make_plan(problem, device);
  if (!plan) return std::nullopt;
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
  nb::list steps;
  for (const Step<jit::Source>& step : steps_of(*plan, problem, call, device)) steps.append(step_of(step));
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

nb::dict plan_attention_call(const Arrays& operands, const Arrays& results, const nb::dict& attributes,
                             int compute_capability, int multiprocessors, int shared_memory_per_block,
                             int largest_cluster) {
  Step<jit::Source> step{};
  const Device device{compute_capability, multiprocessors, shared_memory_per_block, largest_cluster};
  raise_if_wrong(plan_attention(call_of<AttentionCall>(operands, results, attributes), device, &step));
  return step_of(step);
}

std::tuple<int, int, bool> attention_tile(const std::string& kernel, int64_t stay, int features, int value_features,
                                          int bytes_of_number, bool reads_arrays, int compute_capability) {
  using namespace attention;
  const auto known = std::find(std::begin(kKernelNames), std::end(kKernelNames), kernel);
  const bool has_numbers = bytes_of_number == 2 || bytes_of_number == 4;
  if (known == std::end(kKernelNames) || !has_numbers ||
      std::max(features, value_features) > most_features(bytes_of_number)) {
    throw nb::value_error("no such kernel of attention");
  }
  const auto kind = static_cast<KernelKind>(known - std::begin(kKernelNames));
  const bool on_hopper = compute_capability == kHopper;
  const bool is_hoppers = on_hopper && hopper_has(kind, features, value_features, bytes_of_number, reads_arrays, stay);
  const Tiling tiling = is_hoppers
                            ? hopper_tiling_of(kind, features, value_features, reads_arrays)
                            : tiling_of(kind, stay, features, value_features, bytes_of_number, reads_arrays, on_hopper);
  return {tiling.rows(), tiling.step, is_hoppers};
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
  // The stub says `object`: of a capsule nanobind writes a name that it does not import on Python 3.13.
  m.def("cpu_handler", [] { return nb::capsule(cpu_handler()); }, nb::sig("def cpu_handler() -> object"));
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
  m.attr("ATTENTION_CELL") = attention::kCell;
  m.attr("ATTENTION_BLOCKS") = attention::kBlocksOfWave;
  m.attr("ATTENTION_FEATURES_AT_ONCE") = attention::kFeaturesAtOnce;
  m.def("why_no_attention", &why_no_attention, nb::arg("letters"), nb::arg("extents"), nb::arg("dtype"),
        "Why attention has no kernels for these; or \"\".");
  m.def("attention_tile", &attention_tile, nb::arg("kernel"), nb::arg("stay"), nb::arg("features"),
        nb::arg("value_features"), nb::arg("bytes_of_number"), nb::arg("reads_arrays"), nb::arg("compute_capability"),
        "How many rows are in a block of a kernel of attention, of so many that stay, and how many pass in a step; and "
        "whether the kernel is Hopper's.");
  m.def("plan_attention", &plan_attention_call, nb::arg("operands"), nb::arg("results"), nb::arg("attributes"),
        nb::arg("compute_capability") = 90, nb::arg("multiprocessors") = 132,
        nb::arg("shared_memory_per_block") = 227 * 1024, nb::arg("largest_cluster") = 16,
        "The kernel of a call of attention, as a step of `plan`.");
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
