#include "plan/attention.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "plan/printing.h"

namespace jax_softmax {

using namespace attention;

namespace {

constexpr int kLeastCapability = 80;  // which have the instructions

// Of the first lines of AttentionCall::expressions: the functions, and their parameters before the side.
constexpr const char* kFunctions[][2] = {{"score", "float x0"},
                                         {"weight", "float y"},
                                         {"score_transposed", "float g, float x0"},
                                         {"weight_transposed", "float t"}};
constexpr size_t kForwardFunctions = 2, kBackwardFunctions = 4;
constexpr const char* kTangentFunction[2] = {"score_tangent", "float x1, float x0"};  // behind the forward functions

using Extents = std::map<char, int64_t>;

bool has(const std::string& letters, char letter) { return letters.find(letter) != letters.npos; }

bool all_in(const std::string& some, const std::string& letters) {
  return std::all_of(some.begin(), some.end(), [&](char letter) { return has(letters, letter); });
}

std::string sorted(std::string letters) {
  std::sort(letters.begin(), letters.end());
  return letters;
}

// The letters of q, k and v, and of the batch: those that keys have, those that queries alone have, along which they
// share keys, and both, in the order in which blocks count them; and those over which the kernel of scores sums.
struct Letters {
  std::string of[3], batch_of_keys, of_queries_alone, summed, batch;

  Letters() = default;
  explicit Letters(std::string_view text) {
    for (int n = kQ; n <= kV; ++n) {
      of[n] = text.substr(0, n < kV ? text.find(',') : text.npos);
      text.remove_prefix(std::min(text.size(), of[n].size() + 1));
    }
    for (const char letter : of[kQ]) {
      if (letter != 'i' && letter != 'd') (has(of[kK], letter) ? batch_of_keys : of_queries_alone) += letter;
    }
    batch = batch_of_keys + of_queries_alone;
  }
  std::string o() const { return of[kQ].substr(0, of[kQ].size() - 1) + "e"; }
  std::string rows() const { return batch_of_keys + of_queries_alone + "i"; }
  // Counts the batch letters that an array lacks, over which a kernel sums, last.
  void sum_all_but(const std::string& letters) {
    std::string kept;
    for (const char letter : batch) (has(letters, letter) ? kept : summed) += letter;
    batch = kept + summed;
  }

  std::string mistake() const {
    for (const AddressIndex n : {kQ, kK, kV}) {
      const char own = "ijj"[n], last = "dde"[n];
      const std::string once = sorted(of[n]);
      if (std::adjacent_find(once.begin(), once.end()) != once.end() || !has(once, own) || of[n].back() != last) {
        return of[n] + " must have " + own + " and, last, " + last + ", and no letter twice";
      }
    }
    if (sorted(of[kK]) != sorted(batch_of_keys + "jd") || sorted(of[kV]) != sorted(batch_of_keys + "je")) {
      return "keys and values must have the same batch letters, of those of q";
    }
    if (batch.size() > kMostBatchDims) return "at most " + number(kMostBatchDims) + " dimensions of the batch";
    return {};
  }
};

// An array, or the index along a dimension, that scores read.
struct LetteredSide {
  bool is_index;
  std::string letters;
  DType dtype;
  int staged_bytes;  // of an element, if it passes through shared memory, or 0

  bool is_array_of_scores() const { return !is_index && has(letters, 'i') && has(letters, 'j'); }
};

// A call, whose dimensions have letters.
struct AttentionProblem {
  KernelKind kernel;
  Letters letters;
  Extents extents;
  DType dtype;
  bool bounded;
  std::string bounds;  // the letters
  std::vector<LetteredSide> sides;
  bool keeps_lost;                           // whether there is what o lost by rounding
  std::vector<std::string> side_cotangents;  // the letters of each, with p for the parts of a sum over the batch
  Tiling tiling;

  bool has_tangents() const { return kernel == KernelKind::kTangents; }
  bool is_forward() const { return kernel == KernelKind::kForward || has_tangents(); }
  bool of_scores() const { return kernel == KernelKind::kScores; }
  bool writes() const {
    return !side_cotangents.empty() && has(side_cotangents[0], 'i') && has(side_cotangents[0], 'j');
  }
  bool reads_arrays() const {  // of queries x keys
    return std::any_of(sides.begin(), sides.end(), [](const LetteredSide& side) { return side.is_array_of_scores(); });
  }
  int64_t stay() const { return extents.at(kernel == KernelKind::kKeys ? 'j' : 'i'); }
  // The batch letters along which blocks have the same rows.
  const std::string& alike() const { return of_scores() ? letters.summed : letters.of_queries_alone; }
  int64_t cells() const { return ceil_div(stay(), kCell); }
  int64_t product_of(const std::string& of) const {
    int64_t product = 1;
    for (const char letter : of) product *= extents.at(letter);
    return product;
  }
  int first_side() const { return (kernel == KernelKind::kForward ? 3 : 6) + bounded; }
};

// Each of these sets a part of the problem, and returns what is wrong with the call, or nothing.

std::string read_extents(const AttentionCall& call, AttentionProblem* problem) {
  if (call.operands.size() < 3) return "an operand is missing";
  for (const AddressIndex n : {kQ, kK, kV}) {
    const std::vector<int64_t>& shape = call.operands[n].shape;
    const std::string& letters = problem->letters.of[n];
    if (shape.size() != letters.size()) return "q, k and v differ from their letters in rank";
    for (size_t d = 0; d < shape.size(); ++d) problem->extents[letters[d]] = shape[d];
  }
  problem->dtype = call.operands[0].dtype;
  return why_no_attention(call.letters, problem->extents, name_of(problem->dtype));
}

std::string read_sides(const AttentionCall& call, AttentionProblem* problem) {
  std::vector<SideWord> words = split_sides(call.sides);
  problem->bounded = !words.empty() && words[0].name == "bounds";
  if (problem->bounded) {
    problem->bounds = words[0].of;
    words.erase(words.begin());
  }
  size_t next = problem->first_side();
  bool known = all_in(problem->bounds, problem->letters.batch);
  for (const auto& [name, of] : words) {
    LetteredSide side{name == "index", std::string(of), DType::kI32, 0};
    if (!side.is_index && name != "array") return "no such operand: " + std::string(name);
    if (!side.is_index && next >= call.operands.size()) return "an operand is missing";
    if (!side.is_index) side.dtype = call.operands[next++].dtype;
    if (side.dtype == DType::kF64) return "there are no kernels that read float64";
    known &= all_in(side.letters, problem->letters.rows() + "j") && (!side.is_index || side.letters.size() == 1);
    problem->sides.push_back(side);
  }
  return known ? "" : "what scores read beside, and bounds, must have letters of q and k";
}

std::string read_side_cotangents(const AttentionCall& call, AttentionProblem* problem) {
  std::string_view rest = call.side_cotangents;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(' '), rest.size());
    problem->side_cotangents.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  const std::vector<std::string>& of = problem->side_cotangents;
  const Letters& letters = problem->letters;
  bool known = !problem->is_forward() || of.empty();
  if (problem->of_scores()) {
    known = of.size() == 1 && of[0][0] == 'p' && call.results.size() == 1 && !call.results[0].shape.empty();
    if (!known) return "the kernel of scores has one result, in parts";
    problem->extents['p'] = call.results[0].shape[0];
    problem->letters.sum_all_but(of[0]);
    known = of[0] == "p" + letters.batch.substr(0, letters.batch.size() - letters.summed.size()) + "ij";
  }
  for (size_t k = 0; k < of.size() && !problem->of_scores(); ++k) {
    const bool keys = problem->kernel == KernelKind::kKeys, written = k == 0 && !keys && of[k] == letters.rows() + "j";
    known &= written || of[k] == (keys ? letters.batch_of_keys + "j" : letters.rows());
  }
  return known ? "" : "a side's cotangent has other letters than its kernel can make";
}

// Whether the operands and results have the shapes and dtypes that they must have.
bool has_its_arrays(const AttentionCall& call, const AttentionProblem& problem) {
  const Letters& letters = problem.letters;
  const auto array = [&](const std::string& of, DType dtype, const std::vector<int64_t>& inner = {}) {
    Array array{dtype, {}};
    for (const char letter : of) array.shape.push_back(problem.extents.at(letter));
    array.shape.insert(array.shape.end(), inner.begin(), inner.end());
    return array;
  };
  const Array q = array(letters.of[kQ], problem.dtype), k = array(letters.of[kK], problem.dtype),
              v = array(letters.of[kV], problem.dtype), o = array(letters.o(), problem.dtype),
              numbers = array(letters.rows(), DType::kF32, {2}), delta = array(letters.rows(), DType::kF32);
  std::vector<Array> operands{q, k, v}, results{k, v};
  if (!problem.is_forward()) operands.insert(operands.end(), {o, numbers, delta});
  if (problem.has_tangents()) operands.insert(operands.end(), {q, k, v});
  if (problem.bounded) operands.push_back(array(problem.bounds, DType::kI32, {problem.cells(), 4}));
  for (const LetteredSide& side : problem.sides) {
    if (!side.is_index) operands.push_back(array(side.letters, side.dtype));
  }
  if (problem.is_forward()) results = {o, numbers};
  if (problem.kernel == KernelKind::kQueries) results = {q};
  if (problem.of_scores()) results = {};
  if (problem.keeps_lost) results.push_back(array(letters.o(), DType::kI8));
  if (problem.has_tangents()) results.push_back(o);
  for (const std::string& of : problem.side_cotangents) {
    const bool written = problem.writes() && of == problem.side_cotangents[0];
    const size_t k = results.size();
    results.push_back(array(of, written && k < call.results.size() ? call.results[k].dtype : DType::kF32));
  }
  return call.operands == operands && call.results == results;
}

std::string read(const AttentionCall& call, AttentionProblem* problem) {
  const auto kernel = std::find(std::begin(kKernelNames), std::end(kKernelNames), call.kernel);
  if (kernel == std::end(kKernelNames)) return "no such kernel: " + call.kernel;
  problem->kernel = static_cast<KernelKind>(kernel - std::begin(kKernelNames));
  problem->letters = Letters(call.letters);
  problem->keeps_lost = problem->is_forward() && call.results.size() > 2u + problem->has_tangents();
  std::string mistake = read_extents(call, problem);
  if (mistake.empty()) mistake = read_side_cotangents(call, problem);
  if (mistake.empty()) mistake = read_sides(call, problem);
  if (!mistake.empty()) return mistake;
  if (problem->keeps_lost && problem->dtype == DType::kF32) return "float32 loses nothing";
  if (!has_its_arrays(call, *problem)) return "an operand or a result is not as it must be";
  const size_t functions = problem->is_forward() ? kForwardFunctions + problem->has_tangents()
                                                 : kBackwardFunctions + problem->side_cotangents.size();
  return split_lines(call.expressions).size() == functions ? "" : "wrong number of expressions";
}

// How many of float32's bits are left out of what o lost by rounding to 16 bits, which is kept in 8 bits.
int lost_shift(DType dtype) { return 23 - (dtype == DType::kBF16 ? 7 : 10) - 8; }

// Lets arrays of queries x keys whose rows begin at multiples of 16 bytes pass through shared memory, as long as there
// is room: `most` bytes, of which `bytes` are taken. Returns the bytes of shared memory that a block has.
int stage_sides(AttentionProblem* problem, int bytes, int most) {
  const Extents& extents = problem->extents;
  for (LetteredSide& side : problem->sides) {
    const int size = bytes_of(side.dtype), stages = problem->of_scores() ? 1 : problem->tiling.stages;
    const int staged = stages * bytes_of_side(problem->kernel, problem->tiling, size);
    const bool passes =
        side.is_array_of_scores() && side.letters.back() == 'j' && extents.at('j') * size % kPackBytes == 0;
    if (!passes || bytes + staged > most) continue;
    side.staged_bytes = size;
    bytes += staged;
  }
  return bytes;
}

// Whether it is Hopper, and not limited.
bool is_hopper(const Device& device) {
  return device.compute_capability == kHopper && device.shared_memory_per_block > kMostSharedBytes;
}

// Whether Hopper's schedule does it, which reads rows by tensor maps.
bool suits_hopper(const AttentionProblem& problem, const Device& device) {
  const size_t dims = std::max(problem.letters.of[kQ].size(), problem.letters.of[kK].size());
  const int d = static_cast<int>(problem.extents.at('d')), e = static_cast<int>(problem.extents.at('e'));
  return is_hopper(device) && dims <= kMapDims &&
         hopper_has(problem.kernel, d, e, bytes_of(problem.dtype), problem.reads_arrays(), problem.stay());
}

// The letters of the operands that are read by tensor maps.
std::vector<std::string> mapped_letters(const AttentionProblem& problem) {
  std::vector<std::string> letters(std::begin(problem.letters.of), std::end(problem.letters.of));
  letters.push_back(problem.letters.o());
  letters.resize(mapped_operands(problem.kernel));
  return letters;
}

// The tensor map of an operand with these letters: the whole array.
MappedArray map_of(const AttentionProblem& problem, const std::string& letters) {
  MappedArray map{{1, 1, 1, 1, 1}, {kPanel, 1, 1, 1, 1}};
  const char stays = problem.kernel == KernelKind::kKeys ? 'j' : 'i';
  for (size_t dim = 0; dim < letters.size(); ++dim) {
    const char letter = letters[letters.size() - 1 - dim];
    map.extents[dim] = problem.extents.at(letter);
    if (letter == 'i' || letter == 'j') map.box[dim] = letter == stays ? problem.tiling.rows() : problem.tiling.step;
  }
  return map;
}

// ---- The source: the struct Problem that attention/blocks.cuh describes

std::string joined(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
  return "{" + text + "}";
}

// The strides along the batch, queries and keys of an array with the letters `of`, whose innermost one has the stride
// `stride`.
std::string strides_of(const AttentionProblem& problem, const std::string& of, int64_t stride = 1) {
  Extents along{{'i', 0}, {'j', 0}};
  for (auto letter = of.rbegin(); letter != of.rend(); stride *= problem.extents.at(*letter++)) along[*letter] = stride;
  std::vector<std::string> batch;
  for (const char letter : problem.letters.batch) batch.push_back(number(along[letter]));
  return joined({joined(batch), number(along['i']), number(along['j'])});
}

std::string sides_of(const AttentionProblem& problem) {
  std::vector<std::string> strides, addresses, staged, stay;
  int address = problem.first_side();
  for (const LetteredSide& side : problem.sides) {
    strides.push_back(strides_of(problem, side.letters));
    addresses.push_back(number(address));
    staged.push_back(number(side.staged_bytes));
    const std::string& summed = problem.letters.summed;
    stay.push_back(number(!summed.empty() && side.letters.find_first_of(summed) == side.letters.npos));
    address += !side.is_index;
  }
  if (strides.empty()) strides = {"{}"}, addresses = staged = stay = {"0"};  // there are no empty arrays
  return constant("kSides", static_cast<int>(problem.sides.size())) +
         constant("attention::Strides", "kSideStrides[]", joined(strides)) +
         constant("int", "kSideAddresses[]", joined(addresses)) + constant("int", "kStagedBytes[]", joined(staged)) +
         constant("bool", "kSideStays[]", joined(stay));
}

std::string functions_of(const AttentionCall& call, const AttentionProblem& problem) {
  std::string read, text;
  for (size_t s = 0; s < problem.sides.size(); ++s) {
    const LetteredSide& side = problem.sides[s];
    const std::string k = std::to_string(s);
    read += "    [[maybe_unused]] const auto s" + k + " = side.template " +
            (side.is_index ? "index<" + k + ">();\n" : "array<" + k + ", " + type_of(side.dtype) + ">();\n");
  }
  const auto function = [&](const std::string& type, const std::string& name, const std::string& parameters,
                            const std::string& body) {
    text += "  template <class Side>\n  static __device__ __forceinline__ " + type + " " + name + "(" + parameters +
            ", const Side& side) {\n" + read + body + "  }\n";
  };
  const std::vector<std::string> expressions = split_lines(call.expressions);
  const size_t own = problem.is_forward() ? kForwardFunctions : kBackwardFunctions;
  for (size_t f = 0; f < own; ++f) {
    function("float", kFunctions[f][0], kFunctions[f][1], "    return " + expressions[f] + ";\n");
  }
  if (problem.has_tangents()) {
    function("float", kTangentFunction[0], kTangentFunction[1], "    return " + expressions[own] + ";\n");
  } else if (!problem.is_forward()) {
    std::string sums;
    for (size_t f = own; f < expressions.size(); ++f) {
      sums += "    to[" + number(f - own) + "] = " + expressions[f] + ";\n";
    }
    function("void", "side_cotangents", "float* to, float g, float x0, float y, float t", sums);
  }
  return text;
}

// Of a side's cotangent that is an array of queries x keys.
std::string written_of(const AttentionCall& call, const AttentionProblem& problem) {
  const size_t count = problem.side_cotangents.size();
  const std::string of = problem.writes() ? problem.side_cotangents[0] : problem.letters.rows() + "j";
  const DType dtype = problem.writes() ? call.results[call.results.size() - count].dtype : problem.dtype;
  std::string text = constant("kSideCotangents", static_cast<int>(count)) + constant("kWrites", problem.writes()) +
                     "  using Written = " + type_of(dtype) + ";\n" +
                     constant("attention::Strides", "kWrittenStrides", strides_of(problem, of));
  if (problem.of_scores()) {
    const int64_t parts = problem.extents.at('p');
    text += constant("kParts", static_cast<int>(parts)) + constant("kWrittenElements", problem.product_of(of) / parts);
  }
  return text;
}

// What the dimensions of tensor maps are: see attention/blocks.cuh.
std::string map_dims_of(const AttentionProblem& problem) {
  std::vector<std::string> operands;
  for (const std::string& letters : mapped_letters(problem)) {
    std::vector<std::string> dims;
    for (size_t dim = 1; dim < kMapDims; ++dim) {
      const char letter = dim < letters.size() ? letters[letters.size() - 1 - dim] : ' ';
      const size_t of_batch = problem.letters.batch.find(letter);
      dims.push_back(number(letter == ' ' ? -2 : of_batch == std::string::npos ? -1 : static_cast<int>(of_batch)));
    }
    operands.push_back(joined(dims));
  }
  return constant("int", "kMapDims[][" + number(kMapDims - 1) + "]", joined(operands));
}

// The members of the struct.
std::string members_of(const AttentionCall& call, const AttentionProblem& problem) {
  const Letters& letters = problem.letters;
  const Tiling& tiling = problem.tiling;
  const auto strides = [&](const char* name, const std::string& of, int64_t stride = 1) {
    return constant("attention::Strides", name, strides_of(problem, of, stride));
  };
  const auto extent = [&](const char* name, char letter) {
    return constant(name, static_cast<int>(problem.extents.at(letter)));
  };
  const int first_result = static_cast<int>(call.operands.size());
  const std::string addresses = number(first_result + static_cast<int>(call.results.size()));
  // The outermost extent stays out of it, so that batch sizes share a kernel.
  std::vector<std::string> inner{"0"};
  for (size_t d = 1; d < letters.batch.size(); ++d) inner.push_back(number(problem.extents.at(letters.batch[d])));
  const bool maps = tiling.copying > 0;
  return "  using T = " + type_of(problem.dtype) + ";\n  using Addresses = attention::" +
         (maps ? "MappedAddresses<" + number(mapped_operands(problem.kernel)) + ", " : "Addresses<") + addresses +
         ">;\n" + (maps ? map_dims_of(problem) : "") +
         constant("attention::Tiling", "kTiling",
                  joined({number(tiling.warps), number(tiling.fragments), number(tiling.step), number(tiling.parts),
                          number(tiling.resident), number(tiling.copying), number(tiling.stages),
                          number(tiling.same_rows)})) +
         extent("kQueries", 'i') + extent("kKeys", 'j') + extent("kFeatures", 'd') + extent("kValueFeatures", 'e') +
         constant("kBatchDims", static_cast<int>(letters.batch.size())) + constant("int", "kExtents[]", joined(inner)) +
         constant("kGroups", static_cast<int>(problem.product_of(problem.alike()))) + strides("kQ", letters.of[kQ]) +
         strides("kK", letters.of[kK]) + strides("kV", letters.of[kV]) + strides("kO", letters.o()) +
         constant("kBounded", problem.bounded) + constant("kBoundsAddress", problem.first_side() - 1) +
         strides("kBounds", problem.bounds, 4 * problem.cells()) + sides_of(problem) +
         constant("kFirstResult", first_result) + constant("kEmptyRowsAreZero", call.empty_rows == "zero") +
         constant("float", "kWeightFactor", call.factor) +
         constant("kLostShift", problem.keeps_lost ? lost_shift(problem.dtype) : 0) +
         strides("kRowStrides", letters.rows()) + written_of(call, problem) + functions_of(call, problem);
}

}  // namespace

std::string why_no_attention(std::string_view letters, const std::map<char, int64_t>& extents, std::string_view dtype) {
  if (std::string mistake = Letters(letters).mistake(); !mistake.empty()) return mistake;
  const int64_t d = extents.at('d'), e = extents.at('e');
  const bool of_16_bits = dtype == name_of(DType::kF16) || dtype == name_of(DType::kBF16);
  const auto fits = [&](int64_t features) {
    return features % kFeaturesAtOnce == 0 && features <= most_features(of_16_bits ? 2 : 4);
  };
  const bool exist = std::all_of(extents.begin(), extents.end(),
                                 [](const auto& entry) { return entry.second > 0 && entry.second <= INT32_MAX; });
  if ((of_16_bits || dtype == name_of(DType::kF32)) && fits(d) && fits(e) && exist) return {};
  return "there are no kernels of " + std::string(dtype) + " with " + std::to_string(d) + " and " + std::to_string(e) +
         " features";
}

std::string plan_attention(const AttentionCall& call, const Device& device, Step<jit::Source>* step) {
  if (device.compute_capability < kLeastCapability) return "there are no kernels for GPUs before those of 8.0";
  AttentionProblem problem{};
  if (std::string mistake = read(call, &problem); !mistake.empty()) return mistake;
  const int d = static_cast<int>(problem.extents.at('d')), e = static_cast<int>(problem.extents.at('e'));
  const bool reads_arrays = problem.reads_arrays();
  Tiling tiling = hopper_tiling_of(problem.kernel, d, e, reads_arrays);
  int bytes = hopper_shared_bytes(problem.kernel, tiling, d, e), most_bytes = device.shared_memory_per_block;
  const bool on_hopper = suits_hopper(problem, device) && bytes * tiling.resident <= most_bytes;
  if (!on_hopper) {
    tiling = tiling_of(problem.kernel, problem.stay(), d, e, bytes_of(problem.dtype), reads_arrays, is_hopper(device));
    bytes = shared_bytes(problem.kernel, tiling, d, e, bytes_of(problem.dtype));
    most_bytes = kMostSharedBytes;
  }
  problem.tiling = tiling;
  Launch& launch = step->launch = Launch{};
  launch.blocks = ceil_div(problem.stay(), tiling.rows()) * problem.product_of(problem.letters.batch) * tiling.parts;
  const bool of_all_alike = problem.kernel == KernelKind::kKeys || problem.of_scores();
  if (of_all_alike) launch.blocks /= problem.product_of(problem.alike());
  if (problem.of_scores()) launch.blocks *= ceil_div(problem.extents.at('j'), tiling.step) * problem.extents.at('p');
  launch.threads = tiling.threads();
  launch.shared_bytes = stage_sides(&problem, bytes, most_bytes);
  if (on_hopper) {
    for (const std::string& letters : mapped_letters(problem)) launch.maps.push_back(map_of(problem, letters));
  }
  launch.resident = tiling.resident;
  step->kernel.plan = "attention " + call.kernel + " of " + call.letters + ":";
  for (const char letter : problem.letters.of[kQ] + "je") {
    step->kernel.plan += std::string(" ") + letter + "=" + std::to_string(problem.extents.at(letter));
  }
  const std::string function = call.kernel + (on_hopper ? "_on_hopper" : "");
  step->kernel.code =
      std::string("#include \"attention/") + (on_hopper ? "hopper/" : "") +
      (problem.has_tangents() ? "tangents"
       : problem.is_forward() ? "forward"
                              : "backward") +
      ".cuh\"\n\nnamespace jax_softmax::device {\n\nstruct Problem {\n" + members_of(call, problem) + "};\n" +
      kernel_of(launch, "jax_softmax::device::Problem::Addresses", "attention_" + function + "<Problem>(operands);");
  return {};
}

}  // namespace jax_softmax
