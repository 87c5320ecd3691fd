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
#include "src/ops/registry.h"
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

inline std::optional<FeatureMapKind> feature_map(const std::string& name) {
  if (name == "identity") return FeatureMapKind::kIdentity;
  if (name == "elu1") return FeatureMapKind::kElu1;
  if (name == "relu") return FeatureMapKind::kRelu;
  if (name == "elementwise_product") return FeatureMapKind::kElementwiseProduct;
  return std::nullopt;
}

// linear_attn and retention.
inline Recurrence recurrence_of(const GoldenFile& f) {
  Recurrence a;
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

// The call that a file holds; none if its operator or feature map is not among those that exist
// here.
inline std::optional<Call> call_of(const GoldenFile& f) {
  Call call;
  call.d_o = f.tensor("do");
  call.d_s = f.tensor("dht");
  call.d_z = f.tensor("dzt");
  if (f.attribute<std::string>("form", "") == "parallel") call.form = Form::kParallel;
  if (f.op() == "attention") {
    call.arguments = softmax_attention_of(f);
  } else if (f.op() == "short_conv") {
    call.arguments = short_conv_of(f);
  } else if (f.op() == "retention" ||
             (f.op() == "linear_attn" &&
              feature_map(f.attribute<std::string>("feature_map", "identity")))) {
    call.arguments = recurrence_of(f);
  } else {
    return std::nullopt;
  }
  return call;
}

// The file's call by the table of operators, as `ouzel attend` runs it.
inline Results<float> run_operator_of(Context& context, const GoldenFile& f) {
  const OperatorInfo& info = find_operator(f.op());
  std::map<std::string, std::string> given;
  for (const std::string& name : info.attribute_names()) {
    const auto it = f.attributes.find(name);
    if (it == f.attributes.end()) continue;
    given[name] = it->second.is_string() ? it->second.get<std::string>() : it->second.dump();
  }
  std::map<std::string, std::vector<float>> memory;
  std::map<std::string, ConstTensor> tensors;
  for (const char* list : {"inputs", "upstream"}) {
    for (const auto& name : f.attribute<std::vector<std::string>>(list, {})) {
      const reference::Array<double> array = f.tensor(name);
      std::vector<float>& values = memory[name];
      values.assign(array.data.begin(), array.data.end());
      values.push_back(0);  // a tensor without elements has an address too
      ConstTensor tensor;
      tensor.data = values.data();
      tensor.rank = static_cast<int>(array.rank());
      std::int64_t step = 1;
      for (std::size_t i = array.rank(); i-- > 0;) {
        tensor.extent[i] = array.shape[i];
        tensor.stride[i] = step;
        step *= array.shape[i];
      }
      tensors[name] = tensor;
    }
  }
  Results<float> results;
  const Attributes attributes(info, given);
  for (const NamedArray& x : run_operator(context, info, attributes, tensors, /*backward=*/true)) {
    const Tensor& t = x.array.tensor;
    reference::Array<float> array(
        std::vector<std::int64_t>(t.extent.begin(), t.extent.begin() + t.rank));
    std::copy_n(static_cast<const float*>(t.data), array.data.size(), array.data.begin());
    (x.is_gradient ? results.gradients : results.outputs).push_back({x.name, Role::kToken, array});
  }
  return results;
}

// Every tensor that the file expects, among the results of its call.
template <class Real>
void expect_golden(const GoldenFile& f, const Results<Real>& got, const Bounds& bounds) {
  Comparison comparison;
  const auto find = [&](const std::vector<Named<Real>>& list, const std::string& name) {
    for (const Named<Real>& x : list) {
      if (x.name == name) return x.array;
    }
    ADD_FAILURE() << f.path << ": no " << name;
    return reference::Array<Real>();
  };
  for (const auto& name : f.attribute<std::vector<std::string>>("outputs", {})) {
    comparison.output(name, find(got.outputs, name), f.tensor(name));
  }
  for (const auto& name : f.attribute<std::vector<std::string>>("grads", {})) {
    comparison.gradient(name, find(got.gradients, name), f.tensor(name));
  }
  comparison.expect_within(bounds);
}

}  // namespace ouzel::test
