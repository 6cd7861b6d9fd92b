#include "plan/source.h"

namespace jax_softmax {

namespace {

constexpr const char* kElementTypes[kDTypes] = {"Float16",    "BFloat16",   "float", "double",
                                                "Float8E4M3", "Float8E5M2", "Int8",  "UInt8"};
constexpr const char* kHeaders[] = {"registers", "staged", "chunks", "ring", "tile", "twice", "twice"};
constexpr const char* kStructs[] = {"Registers", "Staged", "Chunks", "Ring", "Tile", "Twice", "TwiceTile"};

std::string number(int64_t n) {
  return n >= -(1ll << 31) && n < (1ll << 31) ? std::to_string(n) : std::to_string(n) + "ll";
}

template <class T>
std::string constant(const std::string& name, T value) {
  const char* const type = sizeof(T) == 1 ? "bool" : sizeof(T) == 8 ? "int64_t" : "int";
  return std::string("  static constexpr ") + type + " " + name + " = " + number(value) + ";\n";
}

std::string braced(const int64_t* numbers, int n) {
  std::string text = "{";
  for (int i = 0; i < n; ++i) text += (i ? ", " : "") + number(numbers[i]);
  return text + "}";
}

template <class T>
std::string text_of(T value) {
  return sizeof(T) == 1 ? value ? "true" : "false" : number(value);
}

// A plan's struct as an initializer, with its fields' names.
template <class P>
std::string braced(const P& plan) {
  std::string text;
  plan.each([&](const char* name, auto value) {
    text += (text.empty() ? "{/*" : ", /*") + std::string(name) + "*/ " + text_of(value);
  });
  return text + "}";
}

std::string braced(const Dims& dims) {
  std::string text = "{" + number(dims.size) + ", {";
  for (int i = 0; i < dims.size; ++i)
    text += (i ? ", {" : "{") + number(dims.dim[i].extent) + ", " + number(dims.dim[i].stride) + "}";
  return text + "}}";
}

// The view and the side operands' strides along it. The outermost kept extent stays out of it, so that batch sizes
// share a kernel.
std::string view_of(const Problem& problem) {
  View view = problem.view;
  const bool wide = view.elements() >= 1ll << 31;
  if (view.kept.size > 0) view.kept.dim[0].extent = 0;
  std::string text = "struct View {\n  static constexpr jax_softmax::View kView = {" + braced(view.kept) + ", " +
                     braced(view.reduced) + ", " + (view.minor_reduced ? "true" : "false") + ", 0, " +
                     number(view.columns) + "};\n" + constant("kWide", wide) +
                     constant("kSides", static_cast<int>(problem.sides.size())) +
                     "  static constexpr Strides kSideStrides[] = {";
  for (const Strides& side : problem.sides) {
    text += "{" + braced(side.kept, view.kept.size) + ", " + braced(side.reduced, view.reduced.size) + "}, ";
  }
  return text + (problem.sides.empty() ? "{}" : "") + "};\n};\n\n";
}

}  // namespace

std::string source_of(const Plan& plan, const Step& step, const Problem& problem, const Types& types) {
  const std::string function = step.function;
  const int threads = step.launch.threads;
  const std::string bounds =
      step.launch.resident > 0 ? number(threads) + ", " + number(step.launch.resident) : number(threads);
  const std::string head =
      std::string("#include \"device/") + kHeaders[plan.index()] + ".cuh\"\n\n" + "namespace jax_softmax::device {\n\n";
  const auto kernel = [&](const std::string& body) {
    return "\n}  // namespace jax_softmax::device\n\nextern \"C\" __global__ void __launch_bounds__(" + bounds +
           ")\n    kernel(const __grid_constant__ jax_softmax::device::Operands operands) {\n  using namespace "
           "jax_softmax::device;\n  " +
           body + "\n}\n";
  };
  if (function == "clear_words") return head + kernel("clear_words(operands, operands.rows);");

  const DType wide = bytes_of(types.in) > bytes_of(types.out) ? types.in : types.out;
  std::string text = head;
  if (!types.fused.empty()) {
    text += "struct Fused {\n  static constexpr bool kNothing = false;\n" +
            constant("kSides", static_cast<int>(types.sides.size())) + "  template <int side>\n  using Side = ";
    std::string chain = "void";
    for (size_t i = types.sides.size(); i-- > 0;) {
      chain = "typename Conditional<side == " + number(static_cast<int64_t>(i)) + ", " +
              kElementTypes[static_cast<int>(types.sides[i])] + ", " + chain + ">::type";
    }
    text += chain +
            ";\n  template <class C>\n  static __device__ __forceinline__ C apply(C x, const C* s) {\n    return " +
            types.fused + ";\n  }\n};\n\n";
  }
  const std::string op = facts_of(types.op).type, out = kElementTypes[static_cast<int>(types.out)];
  const std::string policy = "PolicyOf<" + op + ", " + kElementTypes[static_cast<int>(wide)] + ", " + out + ">::type";
  text += view_of(problem);
  text += "using Mem = Memory<" + op + "<" + policy + ">, " + kElementTypes[static_cast<int>(types.in)] + ", " + out +
          ", " + (types.fused.empty() ? "NothingFused" : "Fused") + ", " + (problem.masked ? "true" : "false") + ", " +
          (problem.packs ? "true" : "false") + ", View>;\n\n";
  const Footprint call = problem.footprint();
  text += "struct Plan {\n  static constexpr " + std::string(kStructs[plan.index()]) +
          " kPlan = " + std::visit([](const auto& p) { return braced(p); }, plan) +
          ";\n  static constexpr Footprint kCall = {" + number(call.in_bytes) + ", " + number(call.out_bytes) + ", " +
          number(call.inputs) + ", " + number(call.state_bytes) + ", " + text_of(call.packs) + ", " +
          text_of(call.row_operands) + "};\n";
  return text + "};\n" + kernel(function + "<Mem, Plan>(operands);");
}

}  // namespace jax_softmax
