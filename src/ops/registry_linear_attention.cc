// The rows of linear attention with its feature maps.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/linear_attention.h"
#include "src/base/text.h"
#include "src/ops/feature_map.h"
#include "src/ops/registry_recurrence.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

// Throws Error(kInvalidArgument) for a variant that the map does not have.
FeatureMap feature_map_of(const Attributes& attributes) {
  const std::string &name = attributes.text("feature_map"), &variant = attributes.text("variant");
  FeatureMap map;
  std::vector<std::string> variants;
  bool found = false;
  for (const FeatureMapInfo& info : feature_maps()) {
    if (name != info.name) continue;
    const std::string own = info.variant != nullptr ? info.variant : "";
    if (!own.empty()) variants.push_back(own);
    if (found || !(variant.empty() || variant == own)) continue;
    map.kind = info.kind;
    found = true;
  }
  if (!found) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("linear_attention: the feature map {} has no variant '{}'{}", name, variant,
                    variants.empty() ? "" : "; it has " + joined(variants, " and ")));
  }
  FeatureMapOptions& o = map.options;
  o.nu = attributes.integer("nu").value_or(o.nu);
  o.kernel_eps = attributes.number("kernel_eps").value_or(o.kernel_eps);
  o.l2norm_eps = attributes.number("l2norm_eps").value_or(o.l2norm_eps);
  o.max_length = attributes.integer("m").value_or(o.max_length);
  return map;
}

std::int64_t features_of(const Attributes& attributes, const KnownExtent& known) {
  const std::int64_t keys = known("K").value_or(1);
  const FeatureMap map = feature_map_of(attributes);
  check_map_options("linear_attention", map);
  return feature_count(map, keys, known("M").value_or(keys), known("L").value_or(1));
}

// Its forward and backward calls, bound to the options.
BoundLaw bound(OperatorCall& call, const LinearAttentionOptions& options,
               const FeatureMapGrads& map_grads) {
  return {.saved_bytes = [&](const auto& in) { return linear_attention_saved_bytes(options, in); },
          .forward = [&](const auto& in,
                         const auto& out) { linear_attention(call.context(), options, in, out); },
          .backward =
              [&](const auto& in, const void* saved, const auto& d_out, const auto& d_in) {
                linear_attention_backward(call.context(), options, in, saved, d_out, d_in,
                                          &map_grads);
              },
          .step =
              [&](const auto& in, const auto& state, const auto& o) {
                linear_attention_step(call.context(), options, in.q, in.k, in.v, state, o);
              }};
}

void run_linear_attention(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  LinearAttentionOptions options;
  FeatureMap& map = options.feature_map;
  map = feature_map_of(attributes);
  FeatureMapGrads grads;
  if (map.kind == FeatureMapKind::kElementwiseProduct) {
    map.q = {call.in("W1"), call.in("b1"), call.in("W2"), call.in("b2")};
    grads.q = {call.out("dW1"), call.out("db1"), call.out("dW2"), call.out("db2")};
  } else if (call.in("Wq").present() || call.in("Wk").present()) {
    for (const char* name : {"W", "b"}) {
      if (!call.in(name).present()) continue;
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("linear_attention: tensor '{}' serves q and k and is superfluous "
                              "beside Wq and Wk; leave it out",
                              name));
    }
    for (const char* name : {"Wq", "Wk"}) {
      if (call.in(name).present()) continue;
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("linear_attention: tensor '{}' [M, K] is missing; maps of q and k "
                              "apart need Wq and Wk",
                              name));
    }
    map.q.w1 = call.in("Wq");
    map.q.b1 = call.in("bq");
    map.k.w1 = call.in("Wk");
    map.k.b1 = call.in("bk");
    grads.q.w1 = call.out("dWq");
    grads.q.b1 = call.out("dbq");
    grads.k.w1 = call.out("dWk");
    grads.k.b1 = call.out("dbk");
  } else if (info_of(map.kind).projections != 0) {
    if (!call.in("W").present()) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("linear_attention: tensor 'W' [M, K] of the feature map {} is "
                              "missing (or Wq and Wk for maps of q and k apart)",
                              info_of(map.kind).name));
    }
    map.q = {call.in("W"),      call.in("b"),     {}, {}, call.in("psi_w1"), call.in("psi_b1"),
             call.in("psi_w2"), call.in("psi_b2")};
    grads.q = {
        call.out("dW"),      call.out("db"),     {}, {}, call.out("dpsi_w1"), call.out("dpsi_b1"),
        call.out("dpsi_w2"), call.out("dpsi_b2")};
  }
  options.scale = attributes.number("scale");
  options.normalize = attributes.flag("normalize");
  options.eps = attributes.number("eps");
  options.causal = attributes.flag("causal");
  options.reverse = attributes.flag("reverse");
  options.form = form_of(attributes);
  run_law(call, bound(call, options, grads), options.normalize);
}

// Polynomial kernels of x = scale q.k: the features hold the roots of the scale. Without states the
// quadratic form serves, which is exact where x is small beside |q| |k|.
void run_polynomial(OperatorCall& call, FeatureMapKind kind) {
  LinearAttentionOptions options;
  options.feature_map.kind = kind;
  options.feature_map.options.kernel_scale = call.attributes().number("scale");
  options.normalize = call.attributes().flag("normalize");
  options.eps = call.attributes().number("eps");
  options.form = Form::kParallel;
  const FeatureMapGrads none;
  run_law(call, bound(call, options, none), options.normalize);
}
void run_based(OperatorCall& call) { run_polynomial(call, FeatureMapKind::kTaylor2Symmetric); }
void run_rebased(OperatorCall& call) { run_polynomial(call, FeatureMapKind::kRebased); }

void run_cosformer(OperatorCall& call) {
  LinearAttentionOptions options;
  options.feature_map.kind = FeatureMapKind::kCosformer;
  const std::int64_t longest = std::max(call.in("q").extent[1], call.in("k").extent[1]);
  options.feature_map.options.max_length =
      call.attributes().integer("m").value_or(std::max<std::int64_t>(longest, 1));
  options.normalize = true;
  options.eps = call.attributes().number("eps");
  options.causal = call.attributes().flag("causal");
  const FeatureMapGrads none;
  run_law(call, bound(call, options, none), true);
}

// Names of the table, one of each.
std::vector<std::string> map_names() {
  std::vector<std::string> names;
  for (const FeatureMapInfo& info : feature_maps()) {
    if (names.empty() || names.back() != info.name) names.push_back(info.name);
  }
  return names;
}

}  // namespace

std::vector<OperatorInfo> linear_attention_rows() {
  // linear_attention keeps states of features, in its causal form only, and z beside S if it is
  // normalised.
  const auto of_features = [](TensorInfo state) {
    state.shape = "N HV F V";
    state.when += " causal=true";
    return state;
  };
  const char* product = "feature_map=elementwise_product";
  const char* projected =
      "feature_map=favor_positive|favor_hyperbolic|favor_relu|rff|t2r|hedgehog|luna";
  const char* trained = "feature_map=t2r|hedgehog|luna";  // random projections are fixed
  const char* apart = "feature_map=t2r|hedgehog";
  const char* biased = "feature_map=t2r|hedgehog variant!=separate";
  const char* luna = "feature_map=luna";
  const AttributeInfo quadratic_scale = {"scale", kNumber, "Factor on q.k (default: K^-0.5)"};
  const AttributeInfo normalize = {"normalize", kFlag, "Divide by the sum of the weights", "true"};
  const AttributeInfo eps = {"eps",  kNumber, "Added to the sum of the weights",
                             "1e-6", {},      kNotNegative};
  return {
      {"linear_attention",
       {"linear_attn"},
       "S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t); o_t = S_t^T (scale phi(q_t)), "
       "divided by (scale phi(q_t)) . z_t + eps if normalize; not causal: S and z of the whole "
       "sequence",
       "arXiv:2006.16236",
       {kQueryTensor,
        kKeyTensor,
        kValueTensor,
        {"W1", "M K|HK M K", "dW1", false, product},
        {"b1", "M|HK M", "db1", true, product},
        {"W2", "M K|HK M K", "dW2", false, product},
        {"b2", "M|HK M", "db2", true, product},
        {"W", "M K|HK M K", "dW", true, projected, DType::kF32, trained},
        {"b", "M|HK M", "db", true, biased},
        {"Wq", "M K|HQ M K", "dWq", true, apart},
        {"bq", "M|HQ M", "dbq", true, biased},
        {"Wk", "M K|HK M K", "dWk", true, apart},
        {"bk", "M|HK M", "dbk", true, biased},
        {"psi_w1", "J", "dpsi_w1", false, luna},
        {"psi_b1", "J", "dpsi_b1", false, luna},
        {"psi_w2", "L J", "dpsi_w2", false, luna},
        {"psi_b2", "L", "dpsi_b2", false, luna},
        of_features(kInitialStateTensor),
        {"initial_z", "N HV F", "dz0", true, "form!=parallel causal=true normalize=true"}},
       {kOutputTensor,
        of_features(kFinalStateTensor),
        {"z", "N HV F", "dzt", false, "form!=parallel causal=true normalize=true"},
        kWeightsTensor},
       {{"feature_map", kText, "Map phi of q and k", "identity", map_names()},
        {"variant",
         kText,
         "Of taylor2: full (default), symmetric; of hedgehog: joint (default), separate",
         "",
         {"full", "symmetric", "joint", "separate"}},
        {"nu", kInteger, "Products of dpfp", "1", {}, {1, kMostDpfpProducts}},
        {"kernel_eps", kNumber, "Added to the features of favor_relu", "0.001", {}, kNotNegative},
        {"l2norm_eps", kNumber, "Added to |x|^2 by l2norm", "1e-6", {}, kNotNegative},
        {"m", kInteger, "Length that positions of cosformer stay below", "", {}, kAtLeastOne},
        {"scale", kNumber, "Factor on phi(q) (default: 1; identity and dpfp K^-0.5)"},
        {"normalize", kFlag, "Divide by the sum of the weights", "false"},
        {"eps",
         kNumber,
         "Added to the sum of the weights, of cosformer its least value (default: 1e-6; identity "
         "1e-10, dpfp 1e-5; exp, favor_relu and signed maps 0)",
         "",
         {},
         kNotNegative},
        {"causal", kFlag, "A token sees no later one", "true"},
        kReverseAttribute,
        kCuSeqlensAttribute,
        kFormAttribute},
       run_linear_attention,
       {4, 10},
       nullptr,
       features_of},
      {"based",
       {},
       "o_t = sum_{s<=t} w_ts v_s, w = 1 + x + x^2/2, x = scale q_t.k_s, divided by sum w + eps if "
       "normalize",
       "arXiv:2402.18668",
       {kQueryTensor, kKeyTensor, kValueTensor},
       {kOutputTensor},
       {quadratic_scale, normalize, eps, kCuSeqlensAttribute},
       run_based},
      {"rebased",
       {},
       "o_t = sum_{s<=t} w_ts v_s, w = (scale q_t.k_s)^2, divided by sum w + eps if normalize",
       "arXiv:2402.10644",
       {kQueryTensor, kKeyTensor, kValueTensor},
       {kOutputTensor},
       {quadratic_scale, normalize, eps, kCuSeqlensAttribute},
       run_rebased},
      {"cosformer",
       {},
       "o_i = sum_j w_ij v_j / max(sum_j w_ij, eps), w = relu(q_i).relu(k_j) cos(pi/2 (i-j)/m)",
       "arXiv:2202.08791",
       {token_rows("q", "B TQ HQ K", "dq"), token_rows("k", "B TK HK K", "dk"),
        token_rows("v", "B TK HV V", "dv")},
       {token_rows("o", "B TQ HO V", "do")},
       {{"causal", kFlag, "A token sees no later one", "true"},
        {"m",
         kInteger,
         "Length that positions stay below (default: that of the sequence)",
         "",
         {},
         kAtLeastOne},
        {"eps", kNumber, "Least value of the sum of the weights", "1e-6", {}, kNotNegative},
        kCuSeqlensAttribute},
       run_cosformer},
  };
}

}  // namespace ouzel
