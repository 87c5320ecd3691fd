// Rows of averages over positions.
#include "ouzel/efficient_attention.h"
#include "ouzel/lambda_layer.h"
#include "ouzel/nadaraya_watson.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

void run_efficient_attention(OperatorCall& call) {
  const EfficientAttentionOptions options = {
      .variant = call.attributes().text("variant") == "scaling" ? EfficientVariant::kScaling
                                                                : EfficientVariant::kSoftmax,
      .causal = call.attributes().flag("causal")};
  const EfficientAttentionInputs inputs = {.q = call.in("q"),
                                           .k = call.in("k"),
                                           .v = call.in("v"),
                                           .initial_state = call.in("initial_state"),
                                           .initial_lse = call.in("initial_lse"),
                                           .segments = call.segments()};
  if (call.wants_outputs()) {
    efficient_attention(
        call.context(), options, inputs,
        {.o = call.out("o"), .final_state = call.out("final_state"), .lse = call.out("lse")});
  }
  if (!call.backward()) return;
  efficient_attention_backward(call.context(), options, inputs,
                               {.o = call.in("do"), .final_state = call.in("dht")},
                               {.q = call.out("dq"),
                                .k = call.out("dk"),
                                .v = call.out("dv"),
                                .initial_state = call.out("dh0"),
                                .initial_lse = call.out("dlse0")});
}

void run_lambda_layer(OperatorCall& call) {
  const LambdaLayerInputs inputs = {
      .q = call.in("q"), .k = call.in("k"), .v = call.in("v"), .segments = call.segments()};
  if (call.wants_outputs()) {
    lambda_layer(call.context(), inputs, call.out("o"));
  }
  if (!call.backward()) return;
  lambda_layer_backward(call.context(), inputs, call.in("do"), call.out("dq"), call.out("dk"),
                        call.out("dv"));
}

void run_nadaraya_watson(OperatorCall& call) {
  const NadarayaWatsonOptions options = {.kernel = call.attributes().text("kernel") == "exp_dot"
                                                       ? RegressionKernel::kExpDot
                                                       : RegressionKernel::kGaussian,
                                         .bandwidth = call.attributes().number("bandwidth").value(),
                                         .scale = call.attributes().number("scale")};
  const NadarayaWatsonInputs inputs = {
      .x = call.in("x"), .y = call.in("y"), .queries = call.in("queries")};
  if (call.wants_outputs()) {
    nadaraya_watson(call.context(), options, inputs, call.out("o"));
  }
  if (!call.backward()) return;
  nadaraya_watson_backward(call.context(), options, inputs, call.in("do"), call.out("dx"),
                           call.out("dy"), call.out("dqueries"));
}

}  // namespace

std::vector<OperatorInfo> average_rows() {
  return {
      {"efficient_attention",
       {},
       "o = rq(Q) (rk(K)^T V); softmax: rq over features, rk over positions (causal: those so "
       "far); scaling: both divided by sqrt(n)",
       "arXiv:1812.01243",
       {token_rows("q", "B T H K", "dq"),
        token_rows("k", "B T H K", "dk"),
        token_rows("v", "B T H V", "dv"),
        {"initial_state", "N H K V", "dh0", true, "causal=true"},
        {"initial_lse", "N H K", "dlse0", true, "causal=true"}},
       {token_rows("o", "B T H V", "do"),
        {"final_state", "N H K V", "dht", false, "causal=true"},
        {"lse", "N H K", "", false, "causal=true"}},
       {{"variant", kText, "What q and k go through", "softmax", {"softmax", "scaling"}},
        {"causal", kFlag, "A token sees no later one (softmax only)", "false"},
        kCuSeqlensAttribute},
       run_efficient_attention},
      {"lambda_layer",
       {},
       "lambda = sum_u softmax_positions(k_u)^T v_u; o = lambda^T q",
       "arXiv:2102.08602",
       {token_rows("q", "B TQ HQ K", "dq"), token_rows("k", "B TK U K", "dk"),
        token_rows("v", "B TK U V", "dv")},
       {token_rows("o", "B TQ HQ V", "do")},
       {kCuSeqlensAttribute},
       run_lambda_layer},
      {"nadaraya_watson",
       {},
       "o_i = sum_j w_ij y_j / sum_j w_ij; w = exp(-|queries_i - x_j|^2 / (2 bandwidth^2)), or "
       "exp(scale queries_i.x_j)",
       "doi:10.1137/1109020",
       {{"x", "TK D", "dx"}, {"y", "TK V", "dy"}, {"queries", "TQ D", "dqueries"}},
       {{"o", "TQ V", "do"}},
       {{"kernel", kText, "Kernel of the weights", "gaussian", {"gaussian", "exp_dot"}},
        {"bandwidth", kNumber, "Width of the Gaussian", "1", {}, kPositive},
        {"scale", kNumber, "Factor on the dot product (default: D^-0.5)"}},
       run_nadaraya_watson},
  };
}

}  // namespace ouzel
