// Golden files: the calls that they hold as arguments of the references, and their expected
// tensors. Names and attributes are those of scripts/make_golden.py.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ouzel/error.h"
#include "src/formats/files.h"
#include "src/formats/json.h"
#include "src/formats/safetensors.h"
#include "src/ops/reference/recurrence.h"
#include "src/ops/reference/short_conv.h"
#include "src/ops/reference/softmax_attention.h"

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
  bool has(const std::string& name) const { return tensors.contains(name); }
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

inline std::optional<FeatureMapKind> feature_map(const std::string& name) {
  if (name == "identity") return FeatureMapKind::kIdentity;
  if (name == "elu1") return FeatureMapKind::kElu1;
  if (name == "relu") return FeatureMapKind::kRelu;
  if (name == "elementwise_product") return FeatureMapKind::kElementwiseProduct;
  return std::nullopt;
}

// linear_attn and retention.
inline reference::RecurrenceArguments<double> recurrence_of(const GoldenFile& f) {
  reference::RecurrenceArguments<double> a;
  a.q = f.tensor("q");
  a.k = f.tensor("k");
  a.v = f.tensor("v");
  a.s0 = f.tensor("initial_state");
  a.z0 = f.tensor("initial_z");
  a.segments = f.segments(a.q.extent(0), a.q.extent(1));
  a.map = feature_map(f.attribute<std::string>("feature_map", "identity")).value();
  a.q_map = {f.tensor("W1"), f.tensor("b1"), f.tensor("W2"), f.tensor("b2")};
  if (f.op() == "retention") a.log_decay = reference::retention_log_decay<double>(a.v.extent(2));
  a.scale = f.attribute("scale", 1.0);
  a.normalize = f.attribute("normalize", false);
  a.eps = f.attribute("eps", 0.0);
  a.causal = f.attribute("causal", true);
  a.reverse = f.attribute("reverse", false);
  return a;
}

inline reference::RecurrenceResults<double> recurrence_upstream_of(const GoldenFile& f) {
  return {f.tensor("do"), f.tensor("dht"), f.tensor("dzt")};
}

inline reference::SoftmaxAttentionArguments<double> softmax_attention_of(const GoldenFile& f) {
  reference::SoftmaxAttentionArguments<double> a;
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

inline reference::ShortConvArguments<double> short_conv_of(const GoldenFile& f) {
  reference::ShortConvArguments<double> a;
  a.x = f.tensor("x");
  a.weight = f.tensor("weight");
  a.bias = f.tensor("bias");
  a.s0 = f.tensor("initial_state");
  a.segments = f.segments(a.x.extent(0), a.x.extent(1));
  a.silu = f.attribute<std::string>("activation", "none") == "silu";
  return a;
}

}  // namespace ouzel::test
