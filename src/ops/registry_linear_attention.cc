// The rows of linear attention with its feature maps.
#include <string>

#include "ouzel/linear_attention.h"
#include "src/ops/registry_recurrence.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

FeatureMapKind feature_map_of(const Attributes& attributes) {
  const std::string name = attributes.text("feature_map");
  return name == "elu1"                  ? FeatureMapKind::kElu1
         : name == "relu"                ? FeatureMapKind::kRelu
         : name == "elementwise_product" ? FeatureMapKind::kElementwiseProduct
                                         : FeatureMapKind::kIdentity;
}

void run_linear_attention(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  LinearAttentionOptions options;
  options.feature_map.kind = feature_map_of(attributes);
  options.feature_map.q = {call.in("W1"), call.in("b1"), call.in("W2"), call.in("b2")};
  options.scale = attributes.number("scale");
  options.normalize = attributes.flag("normalize");
  options.eps = attributes.number("eps");
  options.causal = attributes.flag("causal");
  options.reverse = attributes.flag("reverse");
  options.form = form_of(attributes);
  FeatureMapGrads map_grads;
  map_grads.q = {call.out("dW1"), call.out("db1"), call.out("dW2"), call.out("db2")};
  run_law(call,
          {.saved_bytes = [&](const auto& in) { return linear_attention_saved_bytes(options, in); },
           .forward = [&](const auto& in,
                          const auto& out) { linear_attention(call.context(), options, in, out); },
           .backward =
               [&](const auto& in, const void* saved, const auto& d_out, const auto& d_in) {
                 linear_attention_backward(call.context(), options, in, saved, d_out, d_in,
                                           &map_grads);
               }},
          options.normalize);
}

}  // namespace

std::vector<OperatorInfo> linear_attention_rows() {
  // linear_attention keeps states in its causal form only, and z beside S if it is normalised.
  const auto when = [](TensorInfo info, const char* condition) {
    info.when += (info.when.empty() ? "" : " ") + std::string(condition);
    return info;
  };
  const char* learned = "feature_map=elementwise_product";
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
        {"W1", "M K|HK M K", "dW1", false, learned},
        {"b1", "M|HK M", "db1", true, learned},
        {"W2", "M K|HK M K", "dW2", false, learned},
        {"b2", "M|HK M", "db2", true, learned},
        when(kInitialStateTensor, "causal=true"),
        {"initial_z", "N HV F", "dz0", true, "form!=parallel causal=true normalize=true"}},
       {kOutputTensor,
        when(kFinalStateTensor, "causal=true"),
        {"z", "N HV F", "dzt", false, "form!=parallel causal=true normalize=true"},
        kWeightsTensor},
       {{"feature_map",
         kText,
         "Map phi of q and k",
         "identity",
         {"identity", "elu1", "relu", "elementwise_product"}},
        {"scale", kNumber, "Factor on phi(q) (default: K^-0.5 for the identity map, else 1)"},
        {"normalize", kFlag, "Divide by the sum of the weights", "false"},
        {"eps", kNumber,
         "Added to the sum of the weights (default: 1e-6; identity 1e-10; elementwise_product 0)"},
        {"causal", kFlag, "A token sees no later one", "true"},
        kReverseAttribute,
        kCuSeqlensAttribute,
        kFormAttribute},
       run_linear_attention,
       {4, 10}},
  };
}

}  // namespace ouzel
