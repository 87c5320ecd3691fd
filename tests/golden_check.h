// Runs the call of a golden file and compares every tensor that the file expects.
#pragma once

#include <string>
#include <vector>

#include "tests/compare.h"
#include "tests/golden.h"

namespace ouzel::test {

// What a call gave, by the names of the golden files.
template <class Real>
struct GoldenResults {
  std::map<std::string, reference::Array<Real>> outputs, gradients;
};

// Whether the file's operator and feature map are among those that exist here.
inline bool supported(const GoldenFile& f) {
  if (f.op() == "linear_attn") {
    return feature_map(f.attribute<std::string>("feature_map", "identity")).has_value();
  }
  return f.op() == "retention" || f.op() == "attention" || f.op() == "short_conv";
}

template <class Real>
GoldenResults<Real> recurrence_results(const reference::RecurrenceResults<Real>& r,
                                       const reference::RecurrenceGradients<Real>& g) {
  return {{{"o", r.o}, {"final_state", r.s}, {"z", r.z}},
          {{"dq", g.q},
           {"dk", g.k},
           {"dv", g.v},
           {"dh0", g.s0},
           {"dz0", g.z0},
           {"dW1", g.q_map.w1},
           {"db1", g.q_map.b1},
           {"dW2", g.q_map.w2},
           {"db2", g.q_map.b2}}};
}

inline GoldenResults<double> run_reference(const GoldenFile& f) {
  if (f.op() == "attention") {
    const auto a = softmax_attention_of(f);
    const auto g = reference::softmax_attention_backward(a, f.tensor("do"));
    return {{{"o", reference::softmax_attention(a).o}}, {{"dq", g.q}, {"dk", g.k}, {"dv", g.v}}};
  }
  if (f.op() == "short_conv") {
    const auto a = short_conv_of(f);
    const auto r = reference::short_conv(a);
    const auto g = reference::short_conv_backward(a, {f.tensor("do"), f.tensor("dht")});
    return {{{"o", r.y}, {"final_state", r.s}},
            {{"dx", g.x}, {"dweight", g.weight}, {"dbias", g.bias}, {"dh0", g.s0}}};
  }
  const auto a = recurrence_of(f);
  auto results = recurrence_results(reference::recurrence(a),
                                    reference::recurrence_backward(a, recurrence_upstream_of(f)));
  if (f.has("weights")) results.outputs["weights"] = reference::recurrence_weights(a);
  return results;
}

template <class Real>
double expect_golden(const GoldenFile& f, const GoldenResults<Real>& got, const Bounds& bounds) {
  Comparison comparison;
  for (const auto& name : f.attribute<std::vector<std::string>>("outputs", {})) {
    comparison.output(name, got.outputs.at(name), f.tensor(name));
  }
  for (const auto& name : f.attribute<std::vector<std::string>>("grads", {})) {
    comparison.gradient(name, got.gradients.at(name), f.tensor(name));
  }
  return comparison.expect_within(bounds);
}

}  // namespace ouzel::test
