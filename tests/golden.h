// Golden files: the calls that they hold as arguments of the references, and their expected
// tensors. Names and attributes are those of scripts/make_golden.py.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ouzel/error.h"
#include "src/formats/files.h"
#include "src/formats/json.h"
#include "src/formats/safetensors.h"
#include "src/ops/feature_map.h"
#include "src/ops/registry.h"
#include "tests/by_name.h"
#include "tests/calls.h"
#include "tests/compare.h"

namespace ouzel::test {

struct GoldenFile {
  std::string path;
  std::map<std::string, Json> attributes;  // strings that are no JSON stay strings
  std::map<std::string, reference::Array<double>> tensors;

  // Absent if the file has no such tensor.
  reference::Array<double> tensor(const std::string& name) const {
    const auto it = tensors.find(name);
    return it == tensors.end() ? reference::Array<double>() : it->second;
  }
  template <class T>
  T attribute(const std::string& name, T otherwise) const {
    const auto it = attributes.find(name);
    return it == attributes.end() || it->second.is_null() ? otherwise : it->second.get<T>();
  }
  std::string op() const { return attribute<std::string>("op", ""); }
  Segments segments(std::int64_t batch, std::int64_t tokens) const {
    const auto cu_seqlens = attribute<std::vector<std::int64_t>>("cu_seqlens", {});
    return cu_seqlens.empty() ? Segments::whole(batch, tokens) : Segments::packed(cu_seqlens);
  }
};

inline GoldenFile load_golden(const std::string& path) {
  GoldenFile file{path, {}, {}};
  const SafetensorsReader reader(path);
  for (const auto& [key, value] : reader.metadata()) {
    const Json json = Json::parse(value, nullptr, /*allow_exceptions=*/false);
    file.attributes[key] = json.is_discarded() ? Json(value) : json;
  }
  for (const NamedTensor& t : reader.tensors()) {
    reference::Array<double> array(t.shape);
    reader.read_f64(t, array.data.data());
    file.tensors[t.name] = std::move(array);
  }
  return file;
}

// The files that a folder's index.json lists. A missing index or file is an Error.
inline std::vector<std::string> golden_files(const std::string& folder) {
  std::vector<std::string> paths;
  const std::string index = folder + "/index.json";
  const Json list = parse_json(read_file(index), index);
  for (const Json& entry : list["files"]) {
    paths.push_back(folder + "/" + entry["file"].get<std::string>());
  }
  return paths;
}

// By its name and variant; that of the operator where the file names none.
inline FeatureMapKind feature_map(const GoldenFile& f) {
  if (f.op() == "based") return FeatureMapKind::kTaylor2;
  if (f.op() == "rebased") return FeatureMapKind::kRebased;
  if (f.op() == "cosformer") return FeatureMapKind::kCosformer;
  const auto name = f.attribute<std::string>("feature_map", "identity");
  const auto variant = f.attribute<std::string>("variant", "");
  for (const FeatureMapInfo& info : feature_maps()) {
    if (name == info.name && (variant.empty() || variant == info.variant)) return info.kind;
  }
  throw Error(ErrorKind::kBadFile, f.path + ": no feature map " + name + " " + variant);
}

// linear_attn and its relatives, and retention.
inline Recurrence recurrence_of(const GoldenFile& f) {
  Recurrence a;
  a.q = f.tensor("q");
  a.k = f.tensor("k");
  a.v = f.tensor("v");
  a.s0 = f.tensor("initial_state");
  a.z0 = f.tensor("initial_z");
  a.segments = f.segments(a.q.extent(0), a.q.extent(1));
  a.key_segments = f.segments(a.k.extent(0), a.k.extent(1));
  a.map = feature_map(f);
  const auto map_of = [&f](const char* w, const char* b) {
    return reference::MapWeights<double>{f.tensor(w),        f.tensor(b),        f.tensor("W2"),
                                         f.tensor("b2"),     f.tensor("psi_w1"), f.tensor("psi_b1"),
                                         f.tensor("psi_w2"), f.tensor("psi_b2")};
  };
  a.q_map = f.tensor("W1").present()   ? map_of("W1", "b1")
            : f.tensor("Wq").present() ? map_of("Wq", "bq")
                                       : map_of("W", "b");
  if (f.tensor("Wk").present()) a.k_map = map_of("Wk", "bk");
  a.map_options.nu = f.attribute("nu", a.map_options.nu);
  a.map_options.kernel_eps = f.attribute("kernel_eps", a.map_options.kernel_eps);
  a.map_options.l2norm_eps = f.attribute("l2norm_eps", a.map_options.l2norm_eps);
  a.map_options.max_length = f.attribute("m", a.map_options.max_length);
  if (f.op() == "retention") a.log_decay = reference::retention_log_decay<double>(a.v.extent(2));
  if (f.op() == "lightning") {
    a.log_decay = reference::lightning_log_decay<double>(
        a.v.extent(2), f.attribute<std::int64_t>("layer_idx", 0),
        f.attribute<std::int64_t>("num_layers", 1),
        f.attribute<std::string>("slopes", "") == "geometric");
  }
  a.scale = f.attribute("scale", 1.0);
  if (f.op() == "based" || f.op() == "rebased") {
    a.map_options.kernel_scale = a.scale;
    a.scale = 1;
  }
  a.normalize = f.attribute("normalize", f.op() == "cosformer");
  a.eps = f.attribute("eps", 0.0);
  a.causal = f.attribute("causal", true);
  a.reverse = f.attribute("reverse", false);
  return a;
}

inline Attention softmax_attention_of(const GoldenFile& f) {
  Attention a;
  a.q = f.tensor("q");
  a.k = f.tensor("k");
  a.v = f.tensor("v");
  a.query_segments = f.segments(a.q.extent(0), a.q.extent(1));
  a.key_segments = f.segments(a.k.extent(0), a.k.extent(1));
  a.scale = f.attribute("scale", 1.0);
  a.causal = f.attribute("causal", true);
  a.window = f.attribute<std::int64_t>("window_size", 0);
  a.q_offset = f.attribute<std::int64_t>("q_offset", 0);
  return a;
}

inline Conv short_conv_of(const GoldenFile& f) {
  Conv a;
  a.x = f.tensor("x");
  a.weight = f.tensor("weight");
  a.bias = f.tensor("bias");
  a.s0 = f.tensor("initial_state");
  a.segments = f.segments(a.x.extent(0), a.x.extent(1));
  a.silu = f.attribute<std::string>("activation", "none") == "silu";
  return a;
}

inline reference::Tensors<double> upstream_of(const GoldenFile& f) {
  reference::Tensors<double> upstream;
  for (const auto& name : f.attribute<std::vector<std::string>>("upstream", {})) {
    upstream[name] = f.tensor(name);
  }
  return upstream;
}
inline Form form_of(const GoldenFile& f) {
  return f.attribute<std::string>("form", "") == "parallel" ? Form::kParallel : Form::kAuto;
}

inline reference::LawArguments<double> law_arguments_of(const GoldenFile& f) {
  reference::LawArguments<double> a;
  a.law = f.op();
  for (const auto& name : f.attribute<std::vector<std::string>>("inputs", {})) {
    a.inputs[name] = f.tensor(name);
  }
  const Doubles o = f.tensor("o");
  a.segments = f.segments(o.extent(0), o.extent(1));
  if (!f.attribute("scale_is_default", false)) a.scale = f.attribute("scale", 1.0);
  a.reverse = f.attribute("reverse", false);
  a.l2norm = f.attribute("use_qk_l2norm", false);
  return a;
}

// The file's call by the table of operators, as `ouzel attend` runs it; none if the table has no
// such operator or variant.
inline std::optional<Call> table_call_of(const GoldenFile& f) {
  if (!is_operator(f.op())) return std::nullopt;
  ByName a;
  a.op = f.op();
  for (const AttributeInfo& info : find_operator(a.op).attributes) {
    const auto it = f.attributes.find(info.name);
    if (it == f.attributes.end()) continue;
    const std::string text =
        it->second.is_string() ? it->second.get<std::string>() : it->second.dump();
    if (!info.choices.empty() && std::ranges::count(info.choices, text) == 0) return std::nullopt;
    a.attributes[info.name] = text;
  }
  for (const auto& name : f.attribute<std::vector<std::string>>("inputs", {})) {
    a.inputs[name] = f.tensor(name);
  }
  const Doubles o = f.tensor("o");
  a.segments = f.segments(o.extent(0), o.extent(1));
  return Call{std::move(a), upstream_of(f), {}, form_of(f)};
}

// What the reference makes of a file's call; none if there is no reference of its operator.
inline std::optional<Results<double>> reference_results(const GoldenFile& f) {
  Call call{{}, upstream_of(f), {}, form_of(f)};
  if (is_law(f.op())) return run_reference(call, law_arguments_of(f));
  if (has_named_reference(f.op())) return run_reference(table_call_of(f).value());
  if (f.op() == "attention") {
    call.arguments = softmax_attention_of(f);
  } else if (f.op() == "short_conv") {
    call.arguments = short_conv_of(f);
  } else if (f.op() == "retention" || f.op() == "lightning" || f.op() == "linear_attn" ||
             f.op() == "based" || f.op() == "rebased" || f.op() == "cosformer") {
    call.arguments = recurrence_of(f);
  } else {
    return std::nullopt;
  }
  return run_reference(call);
}

// Every tensor that the file expects, among the results of its call.
template <class Real>
void expect_golden(const GoldenFile& f, const Results<Real>& got, const Bounds& bounds,
                   double gradient_floor = kFloor) {
  Comparison comparison;
  for (const auto& name : f.attribute<std::vector<std::string>>("outputs", {})) {
    comparison.output(name, array_of(got.outputs, name), f.tensor(name));
  }
  for (const auto& name : f.attribute<std::vector<std::string>>("grads", {})) {
    comparison.gradient(name, array_of(got.gradients, name), f.tensor(name));
  }
  comparison.expect_within(bounds, gradient_floor);
}

}  // namespace ouzel::test
