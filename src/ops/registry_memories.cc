// Rows of memories that are no rows of the recurrence.
#include "ouzel/gated_oja_rule.h"
#include "ouzel/log_linear_attention.h"
#include "ouzel/mlstm.h"
#include "ouzel/rfa_gate.h"
#include "ouzel/ttt_linear.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

void run_mlstm(OperatorCall& call) {
  const MlstmOptions options = {.scale = call.attributes().number("scale")};
  const MlstmInputs inputs = {.q = call.in("q"),
                              .k = call.in("k"),
                              .v = call.in("v"),
                              .i = call.in("i"),
                              .f = call.in("f"),
                              .initial_state = call.in("initial_state"),
                              .initial_z = call.in("initial_z"),
                              .initial_m = call.in("initial_m"),
                              .segments = call.segments()};
  if (call.wants_outputs()) {
    mlstm(call.context(), options, inputs,
          {.o = call.out("o"),
           .final_state = call.out("final_state"),
           .z = call.out("z"),
           .m = call.out("m")});
  }
  if (!call.backward()) return;
  mlstm_backward(
      call.context(), options, inputs,
      {.o = call.in("do"), .final_state = call.in("dht"), .z = call.in("dzt"), .m = call.in("dmt")},
      {.q = call.out("dq"),
       .k = call.out("dk"),
       .v = call.out("dv"),
       .i = call.out("di"),
       .f = call.out("df"),
       .initial_state = call.out("dh0"),
       .initial_z = call.out("dz0"),
       .initial_m = call.out("dm0")});
}

void run_rfa_gate(OperatorCall& call) {
  const RfaGateInputs inputs = {.q = call.in("q"),
                                .k = call.in("k"),
                                .v = call.in("v"),
                                .gate = call.in("gate"),
                                .w = call.in("W"),
                                .sigma = call.in("sigma"),
                                .initial_state = call.in("initial_state"),
                                .initial_z = call.in("initial_z"),
                                .segments = call.segments()};
  if (call.wants_outputs()) {
    rfa_gate(call.context(), inputs,
             {.o = call.out("o"), .final_state = call.out("final_state"), .z = call.out("z")});
  }
  if (!call.backward()) return;
  rfa_gate_backward(call.context(), inputs,
                    {.o = call.in("do"), .final_state = call.in("dht"), .z = call.in("dzt")},
                    {.q = call.out("dq"),
                     .k = call.out("dk"),
                     .v = call.out("dv"),
                     .gate = call.out("dgate"),
                     .sigma = call.out("dsigma"),
                     .initial_state = call.out("dh0"),
                     .initial_z = call.out("dz0")});
}

void run_gated_oja_rule(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  const GatedOjaRuleOptions options = {.scale = attributes.number("scale"),
                                       .use_q_l2norm = attributes.flag("use_q_l2norm"),
                                       .use_k_l2norm = attributes.flag("use_k_l2norm"),
                                       .l2norm_eps = attributes.number("l2norm_eps").value()};
  const GatedOjaRuleInputs inputs = {.q = call.in("q"),
                                     .k = call.in("k"),
                                     .v = call.in("v"),
                                     .beta = call.in("beta"),
                                     .gv = call.in("gv"),
                                     .initial_state = call.in("initial_state"),
                                     .segments = call.segments()};
  if (call.wants_outputs()) {
    gated_oja_rule(call.context(), options, inputs, call.out("o"), call.out("final_state"));
  }
  if (!call.backward()) return;
  gated_oja_rule_backward(call.context(), options, inputs, call.in("do"), call.in("dht"),
                          {.q = call.out("dq"),
                           .k = call.out("dk"),
                           .v = call.out("dv"),
                           .beta = call.out("dbeta"),
                           .gv = call.out("dgv"),
                           .initial_state = call.out("dh0")});
}

void run_log_linear_attention(OperatorCall& call) {
  const LogLinearAttentionOptions options = {.scale = call.attributes().number("scale").value()};
  const LogLinearAttentionInputs inputs = {.q = call.in("q"),
                                           .k = call.in("k"),
                                           .v = call.in("v"),
                                           .g = call.in("g"),
                                           .level_scales = call.in("level_scales"),
                                           .segments = call.segments()};
  if (call.wants_outputs()) {
    log_linear_attention(call.context(), options, inputs, call.out("o"));
  }
  if (!call.backward()) return;
  log_linear_attention_backward(call.context(), options, inputs, call.in("do"),
                                {.q = call.out("dq"),
                                 .k = call.out("dk"),
                                 .v = call.out("dv"),
                                 .g = call.out("dg"),
                                 .level_scales = call.out("dlevel_scales")});
}

void run_ttt_linear(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  const TttLinearOptions options = {
      .scale = attributes.number("scale"),
      .mini_batch_size = attributes.integer("mini_batch_size").value(),
      .eps = attributes.number("eps").value()};
  const TttLinearInputs inputs = {.q = call.in("q"),
                                  .k = call.in("k"),
                                  .v = call.in("v"),
                                  .w = call.in("w"),
                                  .b = call.in("b"),
                                  .eta = call.in("eta"),
                                  .initial_state = call.in("initial_state"),
                                  .initial_bias = call.in("hb0"),
                                  .segments = call.segments()};
  if (call.wants_outputs()) {
    ttt_linear(call.context(), options, inputs,
               {.o = call.out("o"),
                .final_state = call.out("final_state"),
                .final_bias = call.out("hbt")});
  }
  if (!call.backward()) return;
  ttt_linear_backward(
      call.context(), options, inputs,
      {.o = call.in("do"), .final_state = call.in("dht"), .final_bias = call.in("dhbt")},
      {.q = call.out("dq"),
       .k = call.out("dk"),
       .v = call.out("dv"),
       .w = call.out("dw"),
       .b = call.out("db"),
       .eta = call.out("deta"),
       .initial_state = call.out("dh0"),
       .initial_bias = call.out("dhb0")});
}

}  // namespace

std::vector<OperatorInfo> memory_rows() {
  const TensorInfo q = token_rows("q", "B T H K", "dq"), k = token_rows("k", "B T H K", "dk");
  const TensorInfo v = token_rows("v", "B T H V", "dv"), o = token_rows("o", "B T H V", "do");
  const AttributeInfo scale = {"scale", kNumber, "Factor on k (default: K^-0.5)"};
  return {
      {"mlstm",
       {},
       "lf = logsigmoid(f); m' = max(lf + m, i); S' = e^(lf+m-m') S + e^(i-m') (scale k) v^T, z' "
       "likewise with scale k; o = S'^T q / max(|z'.q|, e^-m')",
       "arXiv:2405.04517",
       {q,
        k,
        v,
        token_rows("i", "B T H", "di"),
        token_rows("f", "B T H", "df"),
        {"initial_state", "N H K V", "dh0", true},
        {"initial_z", "N H K", "dz0", true},
        {"initial_m", "N H", "dm0", true}},
       {o, {"final_state", "N H K V", "dht"}, {"z", "N H K", "dzt"}, {"m", "N H", "dmt"}},
       {scale, kCuSeqlensAttribute},
       run_mlstm,
       {5, 14}},
      {"rfa_gate",
       {},
       "f(x) = m^-0.5 [cos(W x^), sin(W x^)], x^ = sigma x / sqrt(|x|^2 + 1e-6); S' = gate S + "
       "(1 - gate) f(k) v^T, z' likewise with f(k); o = S'^T f(q) / (z'.f(q))",
       "arXiv:2103.02143",
       {q,
        k,
        v,
        token_rows("gate", "B T H", "dgate"),
        {"W", "M K|H M K", ""},
        {"sigma", "K", "dsigma", true},
        {"initial_state", "N H R V", "dh0", true},
        {"initial_z", "N H R", "dz0", true}},
       {o, {"final_state", "N H R V", "dht"}, {"z", "N H R", "dzt"}},
       {{"scale", kNumber, "Factor on f(q): above and below the fraction, it cancels", "1"},
        kCuSeqlensAttribute},
       run_rfa_gate,
       {5, 14}},
      {"gated_oja_rule",
       {},
       "R = S Diag(exp gv); S' = R + beta (k - R v) v^T; o = S'^T (scale q)",
       "github.com/fla-org/flash-linear-attention, fla/ops/gated_oja_rule",
       {token_rows("q", "B T HK K", "dq"),
        token_rows("k", "B T HK K", "dk"),
        token_rows("v", "B T HV V", "dv"),
        token_rows("beta", "B T HV", "dbeta"),
        token_rows("gv", "B T HV V", "dgv", true),
        {"initial_state", "N HV K V", "dh0", true}},
       {token_rows("o", "B T HV V", "do"), {"final_state", "N HV K V", "dht"}},
       {kScaleAttribute,
        {"use_q_l2norm", kFlag, "q := q / sqrt(|q|^2 + l2norm_eps)", "false"},
        {"use_k_l2norm", kFlag, "k := k / sqrt(|k|^2 + l2norm_eps)", "false"},
        {"l2norm_eps", kNumber, "Added to the square of the length", "1e-6", {}, kNotNegative},
        kCuSeqlensAttribute},
       run_gated_oja_rule,
       {7, 18}},
      {"log_linear_attention",
       {"log_linear_attn"},
       "o_t = sum_(s<=t) level_scales_t[level(t,s)] exp(g_(s+1) + ... + g_t) (scale q_t.k_s) v_s; "
       "level(t,t) = 0, otherwise 1 + the highest bit in which t and s differ",
       "arXiv:2506.04761",
       {token_rows("q", "B T HK K", "dq"), token_rows("k", "B T HK K", "dk"), v,
        token_rows("g", "B T H", "dg"), token_rows("level_scales", "B T H L", "dlevel_scales")},
       {o},
       {{"scale", kNumber, "Factor on q", "1"}, kCuSeqlensAttribute},
       run_log_linear_attention},
      {"ttt_linear",
       {},
       "per mini-batch: y = S^T k + hb; grad = d/dy 1/2 |LN(y) w + b - (v - k)|^2; "
       "u_t = (S - eta_t sum_(s<=t) k_s grad_s^T)^T (scale q_t) + hb - eta_t sum_(s<=t) grad_s; "
       "o = u + LN(u) w + b",
       "arXiv:2407.04620",
       {q,
        token_rows("k", "B T H K", "dk"),
        token_rows("v", "B T H K", "dv"),
        {"w", "H K", "dw"},
        {"b", "H K", "db"},
        token_rows("eta", "B T H", "deta"),
        {"initial_state", "N H K K", "dh0", true},
        {"hb0", "N H K", "dhb0", true}},
       {token_rows("o", "B T H K", "do"),
        {"final_state", "N H K K", "dht"},
        {"hbt", "N H K", "dhbt"}},
       {kScaleAttribute,
        {"mini_batch_size",
         kInteger,
         "Tokens between two steps of the state",
         "16",
         {},
         kAtLeastOne},
        {"eps", kNumber, "Added to the variance of the layer norm", "1e-6", {}, kNotNegative},
        kCuSeqlensAttribute},
       run_ttt_linear},
  };
}

}  // namespace ouzel
