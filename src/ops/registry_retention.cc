// The rows of laws with one constant decay a head: retention, lightning attention.
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/retention.h"
#include "src/ops/registry_recurrence.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

const AttributeInfo kHeadsAttribute = {"H", kInteger, "Number of value heads, checked if given",
                                       "",  {},       kAtLeastOne};
const TensorInfo kLogDecayTensor = {"g_gamma", "HV", "", true, "", DType::kF64};

// Retention with the decays that the call gives as `g_gamma`, else with those of the rule.
void run_with_decays(OperatorCall& call, std::vector<double> rule) {
  const Attributes& attributes = call.attributes();
  const std::int64_t heads = call.extent("HV");
  if (const auto said = attributes.integer("H"); said && *said != heads) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: H says {} heads and v has {}", call.name(), *said, heads));
  }
  std::span<const double> decays = rule;
  if (const ConstTensor given = call.in("g_gamma"); given.present()) {
    decays = {static_cast<const double*>(given.data), static_cast<std::size_t>(heads)};
  }
  const RetentionOptions options = {.scale = attributes.number("scale"),
                                    .log_decay = decays,
                                    .reverse = attributes.flag("reverse"),
                                    .form = form_of(attributes)};
  run_law(call, {.saved_bytes = [&](const auto& in) { return retention_saved_bytes(options, in); },
                 .forward = [&](const auto& in,
                                const auto& out) { retention(call.context(), options, in, out); },
                 .backward =
                     [&](const auto& in, const void* saved, const auto& d_out, const auto& d_in) {
                       retention_backward(call.context(), options, in, saved, d_out, d_in);
                     },
                 .step =
                     [&](const auto& in, const auto& state, const auto& o) {
                       retention_step(call.context(), options, in.q, in.k, in.v, state, o);
                     }});
}

void run_retention(OperatorCall& call) { run_with_decays(call, {}); }

void run_lightning_attention(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  std::vector<double> decays;
  if (!call.in("g_gamma").present()) {
    const auto layer = attributes.integer("layer_idx"), layers = attributes.integer("num_layers");
    if (!layer || !layers) {
      throw Error(ErrorKind::kInvalidArgument,
                  "lightning_attention: the decay comes from layer_idx in [0, num_layers) and "
                  "num_layers, or from the tensor g_gamma [HV]; give either");
    }
    decays =
        lightning_log_decays(call.extent("HV"), *layer, *layers,
                             attributes.text("slopes") == "geometric" ? LightningSlopes::kGeometric
                                                                      : LightningSlopes::kLinear);
  }
  run_with_decays(call, std::move(decays));
}

}  // namespace

std::vector<OperatorInfo> retention_rows() {
  return {
      {"retention",
       {},
       "S_t = gamma_h S_{t-1} + k_t v_t^T, gamma_h = 1 - 2^(-5-h) or exp(g_gamma_h); "
       "o_t = S_t^T (scale q_t)",
       "arXiv:2307.08621",
       {kQueryTensor, kKeyTensor, kValueTensor, kLogDecayTensor, kInitialStateTensor},
       {kOutputTensor, kFinalStateTensor, kWeightsTensor},
       {kScaleAttribute, kReverseAttribute, kCuSeqlensAttribute, kFormAttribute, kHeadsAttribute},
       run_retention,
       {4, 10}},
      {"lightning_attention",
       {"lightning"},
       "S_t = exp(g_h) S_{t-1} + k_t v_t^T; o_t = S_t^T (scale q_t); g_h = -(8/H) "
       "(1 - layer_idx/num_layers) h, or with geometric slopes -2^(-8(h+1)/H) "
       "(1 - layer_idx/(num_layers-1) + 1e-5)",
       "arXiv:2401.04658, arXiv:2501.08313",
       {kQueryTensor, kKeyTensor, kValueTensor, kLogDecayTensor, kInitialStateTensor},
       {kOutputTensor, kFinalStateTensor, kWeightsTensor},
       {kScaleAttribute,
        {"layer_idx", kInteger, "Index of the layer, from 0", "", {}, kNotNegative},
        {"num_layers", kInteger, "Number of layers", "", {}, kAtLeastOne},
        {"slopes", kText, "Rule of the decays", "linear", {"linear", "geometric"}},
        kReverseAttribute,
        kCuSeqlensAttribute,
        kFormAttribute,
        kHeadsAttribute},
       run_lightning_attention,
       {4, 10}},
  };
}

}  // namespace ouzel
