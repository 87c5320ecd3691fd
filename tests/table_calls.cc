#include "tests/table_calls.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "src/ops/feature_map.h"
#include "src/ops/law.h"
#include "tests/law_calls.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

// The range of an input's values: no exploding memories, no vanishing denominators.
std::pair<double, double> range_of(const std::string& op, const std::string& name) {
  static const std::set<std::string> kFactors = {"gate", "beta", "dt"};
  if (is_log_decay(op, name) || name == "A") return {-0.5, -0.01};
  if (kFactors.contains(name) || (op == "gdn2" && (name == "b" || name == "w"))) return {0.1, 0.9};
  if (name == "eta" || name == "dt_bias") return {0, 0.1};
  if (name == "sigma") return {0.5, 1.5};
  if (op == "rfa_gate" && (name == "W" || name.starts_with("initial"))) return {0.1, 0.3};
  if (op == "rwkv4" && name == "initial_state") return {0.1, 1};  // beta is a sum of weights
  if (name == "initial_z") return {0.5, 1};
  if (is_matrix_law(op) && (name == "k" || name == "a" || name == "b" || name == "p")) {
    return {-0.4, 0.4};
  }
  if (op == "LinearAttention" && name == "key") return {-0.4, 0.4};
  return {-1, 1};
}

}  // namespace

std::string name_of(const TableCase& c) {
  std::string name = c.op;
  for (const auto& [key, value] : c.attributes) name += fmt::format(" {} {}", key, value);
  return name;
}

const OperatorInfo& info_of(const TableCase& c) { return find_operator(c.op); }

std::vector<TableCase> table_cases() {
  std::vector<TableCase> cases;
  const std::vector<std::string> apart = {"Wq", "bq", "Wk", "bk"}, together = {"W", "b"};
  for (const OperatorInfo& info : operators()) {
    TableCase c{info.name};
    if (info.name == "linear_attention") {
      for (const FeatureMapInfo& map : feature_maps()) {
        TableCase mapped = {info.name, {{"feature_map", map.name}}, apart};
        if (map.variant != nullptr) mapped.attributes["variant"] = map.variant;
        if (map.kind == FeatureMapKind::kCosformer) mapped.attributes["m"] = "100";
        cases.push_back(mapped);
        mapped.attributes["normalize"] = "true";
        cases.push_back(mapped);
      }
      cases.push_back({info.name, {{"feature_map", "hedgehog"}}, together});
      cases.push_back({info.name, {{"feature_map", "elu1"}, {"causal", "false"}}, apart});
      continue;
    }
    if (info.name == "lightning_attention") {
      cases.push_back({info.name, {{"layer_idx", "1"}, {"num_layers", "4"}}, {"g_gamma"}});
    }
    if (info.name == "LinearAttention") {
      c.attributes = {{"q_num_heads", "4"}, {"kv_num_heads", "2"}};
      for (const char* rule : {"linear", "gated", "delta"}) {
        TableCase ruled = c;
        ruled.attributes["update_rule"] = rule;
        cases.push_back(ruled);
      }
    }
    if (info.name == "gated_delta_product") c.attributes["num_householder"] = "2";
    cases.push_back(c);
    const auto with = [&](const char* name, const char* value) {
      if (info.find_attribute(name) == nullptr) return;
      TableCase variant = c;
      variant.attributes[name] = value;
      cases.push_back(variant);
    };
    with("use_qk_l2norm", "true");
    with("use_q_l2norm", "true");
    with("causal", info.name == "efficient_attention" ? "true" : "false");
    if (info.name == "nadaraya_watson") with("kernel", "exp_dot");
    if (info.name == "efficient_attention") with("variant", "scaling");
    if (info.name == "gdn2") continue;  // no weights that all values share
    if (info.name == "gla") c.without = {"gv"};
    with("form", "parallel");
  }
  return cases;
}

Letters table_sizes(const TableCase& c, Int tokens, Int keys, Int values) {
  Letters s = {{"B", 2},    {"T", tokens}, {"TQ", tokens}, {"TK", tokens}, {"N", 2},
               {"HQ", 4},   {"HK", 2},     {"HV", 4},      {"HO", 4},      {"H", 2},
               {"K", keys}, {"V", values}, {"D", 7},       {"M", 6},       {"R", 12},
               {"W", 4},    {"U", 2},      {"J", 3},       {"L", 8}};
  const OperatorInfo& info = info_of(c);
  const Attributes attributes(info, c.attributes);
  const bool heads_in_equal_numbers = info.name == "LinearAttention";
  if (heads_in_equal_numbers) s["HV"] = 2;
  s["TN"] = tokens * attributes.integer("num_householder").value_or(1);
  s["QD"] = s["HQ"] * s["K"];
  s["KD"] = s["GD"] = s["HV"] * s["K"];
  s["VD"] = s["HV"] * s["V"];
  s["OD"] = s["HQ"] * s["V"];
  s["BD"] = s["HV"];
  s["TP"] = s["W"] - 1;
  const auto known = [&](std::string_view letter) -> std::optional<Int> {
    const auto found = s.find(std::string(letter));
    return found == s.end() ? std::nullopt : std::optional(found->second);
  };
  s["F"] = info.features != nullptr ? info.features(attributes, known) : s["K"];
  return s;
}

std::vector<Int> shape_of(const TensorInfo& tensor, const Letters& sizes) {
  std::vector<Int> shape;
  std::string rest = tensor.shape.substr(0, tensor.shape.find('|'));
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(' '), rest.size());
    const std::string letter = rest.substr(0, end);
    const bool digit = letter[0] >= '0' && letter[0] <= '9';
    shape.push_back(digit ? std::stoll(letter) : sizes.at(letter));
    rest.erase(0, end + 1);
  }
  return shape;
}

bool is_log_decay(const std::string& op, const std::string& input) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->name != op) continue;
    return std::ranges::any_of(law->inputs, [&](const LawInput& x) {
      return x.name != nullptr && x.name == input &&
             (x.role == LawRole::kDecay || x.role == LawRole::kValueDecay);
    });
  }
  static const std::set<std::string> kNames = {"g", "gv", "g_gamma", "decay"};
  return kNames.contains(input);
}

Call make_call(const TableCase& c, const Letters& sizes, std::uint64_t seed, bool states) {
  Random random(seed);
  const OperatorInfo& info = info_of(c);
  const Attributes attributes(info, c.attributes);
  const auto find = [&](const char* letter) { return sizes.find(letter)->second; };
  ByName a{c.op, c.attributes, {}, Segments::whole(find("B"), find("T"))};
  for (const TensorInfo& input : info.inputs) {
    if (!attributes.hold(input.when) || std::ranges::count(c.without, input.name) != 0) continue;
    if (!states && input.is_state()) continue;
    const auto [least, most] = range_of(info.name, input.name);
    a.inputs[input.name] = random_array<double>(random, shape_of(input, sizes), least, most);
  }
  reference::Tensors<double> upstream;
  for (const TensorInfo& output : info.outputs) {
    if (output.gradient.empty() || !attributes.hold(output.when)) continue;
    if (!states && output.is_state()) continue;
    upstream[output.gradient] = random_array<double>(random, shape_of(output, sizes));
  }
  Call call{std::move(a), std::move(upstream)};
  if (attributes.text("form") == "parallel") call.form = Form::kParallel;
  return call;
}

}  // namespace ouzel::test
