#include "plan/plan.h"
#include "plan/printing.h"

namespace jax_softmax {

namespace {

// In the order of DType; there are no kernels of double.
constexpr const char* kElementTypes[kDTypes] = {"Float16",    "BFloat16", "float", "double", "Float8E4M3",
                                                "Float8E5M2", "Int8",     "UInt8", "Int32",  "Bool"};
constexpr const char* kRoles[] = {"kArray", "kIndex", "kNumber", "kLabel", "kMask"};  // in the order of Role
constexpr const char* kStructs[] = {"Registers", "Staged", "Chunks", "Ring", "Tile", "Twice", "TwiceTile"};

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

// The view, without its outermost batch extent and its rows, so that calls that differ in these share a kernel.
std::string view_of(const Problem& problem) {
  View view = problem.view;
  const bool wide = view.elements() >= 1ll << 31;
  if (view.batch.size > 0) view.batch.dim[0].extent = 0;
  return "struct View {\n  static constexpr jax_softmax::View kView = {" + braced(view.batch) + ", " +
         braced(view.reduced) + ", " + (view.minor_reduced ? "true" : "false") + ", 0, " + number(view.columns) +
         "};\n" + constant("kWide", wide) + "};\n\n";
}

// A member template `Type<k>`: the k-th of the dtypes.
std::string types(const std::vector<DType>& dtypes) {
  std::string chain = "void";
  for (size_t k = dtypes.size(); k-- > 0;) {
    chain = "typename Conditional<k == " + number(static_cast<int64_t>(k)) + ", " + type_of(dtypes[k]) + ", " + chain +
            ">::type";
  }
  return "  template <int k>\n  using Type = " + chain + ";\n";
}

// The operands that broadcast.
std::string sides_of(const Problem& problem, const Call& call) {
  std::vector<DType> dtypes;
  std::string roles, strides, bytes;
  for (size_t s = 0; s < call.sides.size(); ++s) {
    dtypes.push_back(call.sides[s].dtype);
    roles += (s ? ", Role::" : "Role::") + std::string(kRoles[static_cast<int>(call.sides[s].role)]);
    bytes += (s ? ", " : "") + number(bytes_of(call.sides[s].dtype));
    strides += (s ? ", {" : "{") + braced(problem.sides[s].batch, problem.view.batch.size) + ", " +
               braced(problem.sides[s].reduced, problem.view.reduced.size) + "}";
  }
  if (dtypes.empty()) roles = "Role::kArray", strides = "{}", bytes = "0";  // there are no empty arrays
  return "struct Sides {\n" + constant("kCount", static_cast<int>(dtypes.size())) +
         "  static constexpr Role kRoles[] = {" + roles + "};\n  static constexpr SideStrides kStrides[] = {" +
         strides + "};\n  static constexpr int kBytes[] = {" + bytes + "};\n" + types(dtypes) + "};\n\n";
}

// Whether the text has the word, not as a part of another one.
bool has_word(const std::string& text, const std::string& word) {
  const auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || !in_word(text[at - 1])) && (end == text.size() || !in_word(text[end]))) return true;
  }
  return false;
}

// The arrays and indices that expressions read, as bits, and the declarations of their values.
struct SidesRead {
  unsigned bits = 0;
  std::string values;
};
SidesRead sides_read(const Call& call, const std::string& expressions) {
  SidesRead read;
  int k = 0;
  for (const SideOperand& side : call.sides) {
    if (side.role != Role::kArray && side.role != Role::kIndex) continue;
    const std::string name = "s" + std::to_string(k);
    if (has_word(expressions, name)) {
      read.bits |= 1u << k;
      read.values += "    const auto " + name + " = side.template value<" + std::to_string(k) + ">();\n";
    }
    ++k;
  }
  return read;
}

// The struct of the expressions before the operator.
std::string load_of(const Call& call) {
  const SidesRead read = sides_read(call, call.load);
  const std::vector<std::string> lines = split_lines(call.load);
  std::string elements, set;
  for (int k = 0; k < cost_of(call.op).inputs; ++k) {
    const std::string i = std::to_string(k);
    if (has_word(call.load, "x" + i)) elements += "    const C x" + i + " = x[" + i + "];\n";
    if (static_cast<size_t>(k) < lines.size() && !lines[k].empty()) set += "    x[" + i + "] = " + lines[k] + ";\n";
  }
  return "struct Load {\n  static constexpr bool kIdentity = false;\n" +
         constant("kSidesRead", static_cast<int>(read.bits)) +
         "  template <class C, class Side>\n  static __device__ __forceinline__ void apply(C* x, const Side& side) "
         "{\n" +
         read.values + elements + set + "  }\n};\n\n";
}

// And of those after it.
std::string store_of(const Call& call) {
  const SidesRead read = sides_read(call, call.store);
  const std::vector<std::string> lines = split_lines(call.store);
  std::string results;
  for (size_t k = 0; k < lines.size(); ++k) {
    results += (k ? " else if constexpr (k == " : "    if constexpr (k == ") + std::to_string(k) +
               ") {\n      return static_cast<C>(" + (lines[k].empty() ? "y" : lines[k]) + ");\n    }";
  }
  return "struct Store {\n  static constexpr bool kIdentity = false;\n" +
         constant("kSidesRead", static_cast<int>(read.bits)) +
         "  template <int k, class C, class Side>\n  static __device__ __forceinline__ C result(C y, const Side& side) "
         "{\n" +
         read.values + results + "\n  }\n};\n\n";
}

}  // namespace

std::string number(int64_t n) {
  return n >= -(1ll << 31) && n < (1ll << 31) ? std::to_string(n) : std::to_string(n) + "ll";
}

std::string type_of(DType type) { return kElementTypes[static_cast<int>(type)]; }

std::string constant(const std::string& type, const std::string& name, const std::string& value) {
  return "  static constexpr " + type + " " + name + " = " + value + ";\n";
}

std::string kernel_of(const Launch& launch, const std::string& operands, const std::string& body) {
  const std::string resident = launch.resident > 0 ? ", " + number(launch.resident) : "";
  return "\n}  // namespace jax_softmax::device\n\nextern \"C\" __global__ void __launch_bounds__(" +
         number(launch.threads) + resident + ")\n    kernel(const __grid_constant__ " + operands +
         " operands) {\n  using namespace jax_softmax::device;\n  " + body + "\n}\n";
}

std::string source_of(const Plan& plan, const Step<const char*>& step, const Problem& problem, const Call& call) {
  const std::string function = step.kernel;
  const std::string head = std::string("#include \"device/") + kScheduleNames[plan.index()] + ".cuh\"\n\n" +
                           "namespace jax_softmax::device {\n\n";
  const auto count = [](size_t n) { return std::to_string(n); };
  const std::string operands = "jax_softmax::Operands<" + count(problem.cost.inputs) + ", " + count(call.sides.size()) +
                               ", " + count(call.out.size()) + ", " + count(problem.cost.row_results) + ">";
  const auto kernel = [&](const std::string& body) { return kernel_of(step.launch, operands, body); };
  if (function == "clear_words") return head + kernel("clear_words(operands.scratch, operands.rows);");

  const DType out = call.out.empty() ? call.in : call.out[0];
  DType widest = call.in;
  for (const DType result : call.out) widest = bytes_of(result) > bytes_of(widest) ? result : widest;
  const std::string op = facts_of(call.op).type;
  const std::string policy = "PolicyOf<" + op + ", " + type_of(widest) + ", " + type_of(out) + ">::type";
  std::string text = head + view_of(problem) + sides_of(problem, call) + "struct Results {\n" +
                     constant("kCount", static_cast<int>(call.out.size())) +
                     types(call.out.empty() ? std::vector{call.in} : call.out) + "};\n\n";
  if (!call.load.empty()) text += load_of(call);
  if (!call.store.empty()) text += store_of(call);
  text += "using Mem = Memory<" + op + "<" + policy + ">, " + type_of(call.in) + ", View, Sides, Results, " +
          (call.load.empty() ? "Identity" : "Load") + ", " + (call.store.empty() ? "Identity" : "Store") + ", " +
          (problem.footprint.packs ? "true" : "false") + ">;\n\n";
  const Footprint& footprint = problem.footprint;
  text += "struct Plan {\n  static constexpr " + std::string(kStructs[plan.index()]) +
          " kPlan = " + std::visit([](const auto& p) { return braced(p); }, plan) +
          ";\n  static constexpr Footprint kFootprint = {" + number(footprint.in_bytes) + ", " +
          number(footprint.out_bytes) + ", " + number(footprint.inputs) + ", " + number(footprint.state_bytes) + ", " +
          text_of(footprint.packs) + ", " + text_of(footprint.row_operands) + "};\n";
  return text + "};\n" + kernel(function + "<Mem, Plan>(operands);");
}

}  // namespace jax_softmax
