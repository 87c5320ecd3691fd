// Rows of the elementwise scans.
#include "ouzel/hgrn.h"
#include "ouzel/rg_lru.h"
#include "ouzel/rwkv4.h"
#include "ouzel/selective_scan.h"
#include "src/base/half.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

// Whether the outputs are the states that the backward pass reads: those of float32 are. Where
// inputs have 16 bits, outputs of float32 that nobody wants are not made for it.
bool gives_states(const OperatorCall& call, const ConstTensor& x, const Tensor& o) {
  return !is_half(o.dtype) && (call.wants_outputs() || !is_half(x.dtype));
}

void run_hgrn(OperatorCall& call) {
  const HgrnInputs inputs = {.x = call.in("x"),
                             .g = call.in("g"),
                             .initial_state = call.in("initial_state"),
                             .segments = call.segments()};
  const Tensor o = call.out("o");
  const bool backward_has_o = gives_states(call, inputs.x, o);
  if (call.wants_outputs() || backward_has_o) {
    hgrn(call.context(), inputs, {.o = o, .final_state = call.out("final_state")});
  }
  if (!call.backward()) return;
  hgrn_backward(call.context(), inputs, backward_has_o ? o : Tensor(), call.in("do"),
                call.in("dht"), call.out("dx"), call.out("dg"), call.out("dh0"));
}

void run_rg_lru(OperatorCall& call) {
  const RgLruOptions options = {
      .c = call.attributes().number("c").value(),
      .first_multiplier_one = call.attributes().flag("first_multiplier_one")};
  const RgLruInputs inputs = {.x = call.in("x"),
                              .r = call.in("r"),
                              .i = call.in("i"),
                              .a_param = call.in("a_param"),
                              .initial_state = call.in("initial_state"),
                              .segments = call.segments()};
  const Tensor o = call.out("o");
  const bool backward_has_o = gives_states(call, inputs.x, o);
  if (call.wants_outputs() || backward_has_o) {
    rg_lru(call.context(), options, inputs, {.o = o, .final_state = call.out("final_state")});
  }
  if (!call.backward()) return;
  rg_lru_backward(call.context(), options, inputs, backward_has_o ? o : Tensor(), call.in("do"),
                  call.in("dht"),
                  {.x = call.out("dx"),
                   .r = call.out("dr"),
                   .i = call.out("di"),
                   .a_param = call.out("da_param"),
                   .initial_state = call.out("dh0")});
}

void run_rwkv4(OperatorCall& call) {
  const Rwkv4Inputs inputs = {.k = call.in("k"),
                              .v = call.in("v"),
                              .w = call.in("w"),
                              .u = call.in("u"),
                              .initial_state = call.in("initial_state"),
                              .segments = call.segments()};
  if (call.wants_outputs()) {
    rwkv4(call.context(), inputs, {.o = call.out("o"), .final_state = call.out("final_state")});
  }
  if (!call.backward()) return;
  rwkv4_backward(call.context(), inputs, call.in("do"), call.in("dht"),
                 {.k = call.out("dk"),
                  .v = call.out("dv"),
                  .w = call.out("dw"),
                  .u = call.out("du"),
                  .initial_state = call.out("dh0")});
}

void run_selective_scan(OperatorCall& call) {
  const SelectiveScanOptions options = {.dt_softplus = call.attributes().flag("dt_softplus")};
  const SelectiveScanInputs inputs = {.x = call.in("x"),
                                      .dt = call.in("dt"),
                                      .a = call.in("A"),
                                      .b = call.in("B"),
                                      .c = call.in("C"),
                                      .d = call.in("D"),
                                      .z = call.in("z"),
                                      .dt_bias = call.in("dt_bias"),
                                      .initial_state = call.in("initial_state"),
                                      .segments = call.segments()};
  if (call.wants_outputs()) {
    selective_scan(call.context(), options, inputs,
                   {.o = call.out("o"), .final_state = call.out("final_state")});
  }
  if (!call.backward()) return;
  selective_scan_backward(call.context(), options, inputs, call.in("do"), call.in("dht"),
                          {.x = call.out("dx"),
                           .dt = call.out("ddt"),
                           .a = call.out("dA"),
                           .b = call.out("dB"),
                           .c = call.out("dC"),
                           .d = call.out("dD"),
                           .z = call.out("dz"),
                           .dt_bias = call.out("ddt_bias"),
                           .initial_state = call.out("dh0")});
}

}  // namespace

std::vector<OperatorInfo> scan_rows() {
  const TensorInfo x = token_rows("x", "B T D", "dx"), o = token_rows("o", "B T D", "do");
  return {
      {"hgrn",
       {},
       "h_t = exp(g_t) h_{t-1} + x_t; o_t = h_t",
       "arXiv:2311.04823",
       {x, token_rows("g", "B T D", "dg"), {"initial_state", "N D", "dh0", true}},
       {o, {"final_state", "N D", "dht"}},
       {kCuSeqlensAttribute},
       run_hgrn,
       {2, 4}},
      {"rg_lru",
       {},
       "L_t = -c softplus(a_param) sigmoid(r_t); h_t = exp(L_t) h_{t-1} + sqrt(1 - exp(2 L_t)) "
       "sigmoid(i_t) x_t; o_t = h_t",
       "arXiv:2402.19427",
       {x,
        token_rows("r", "B T D", "dr"),
        token_rows("i", "B T D", "di"),
        {"a_param", "D", "da_param"},
        {"initial_state", "N D", "dh0", true}},
       {o, {"final_state", "N D", "dht"}},
       {{"c", kNumber, "Steepness of the gate", "8", {}, kNotNegative},
        {"first_multiplier_one", kFlag, "The root is 1 at the first token of a sequence", "false"},
        kCuSeqlensAttribute},
       run_rg_lru,
       {10, 20}},
      {"rwkv4",
       {},
       "o = (e^eps alpha + e^(u+k) v) / (e^eps beta + e^(u+k)); eps' = max(eps - e^w, k), alpha' = "
       "e^(eps - e^w - eps') alpha + e^(k-eps') v, beta' the same with 1 for v",
       "arXiv:2305.13048",
       {token_rows("k", "B T D", "dk"),
        token_rows("v", "B T D", "dv"),
        {"w", "D", "dw"},
        {"u", "D", "du"},
        {"initial_state", "N 3 1 D", "dh0", true}},
       {o, {"final_state", "N 3 1 D", "dht"}},
       {kCuSeqlensAttribute},
       run_rwkv4,
       {5, 10}},
      {"selective_scan",
       {"mamba1"},
       "S_t[d,m] = exp(dt_d A_dm) S_{t-1}[d,m] + dt_d B_m x_d; o_d = (C . S_t[d] + D_d x_d) "
       "silu(z_d); dt = softplus(dt + dt_bias) if dt_softplus",
       "arXiv:2312.00752",
       {x,
        token_rows("dt", "B T D", "ddt"),
        {"A", "D M", "dA"},
        token_rows("B", "B T M", "dB"),
        token_rows("C", "B T M", "dC"),
        {"D", "D", "dD", true},
        token_rows("z", "B T D", "dz", true),
        {"dt_bias", "D", "ddt_bias", true},
        {"initial_state", "N D M", "dh0", true}},
       {o, {"final_state", "N D M", "dht"}},
       {{"dt_softplus", kFlag, "dt goes through a softplus", "false"}, kCuSeqlensAttribute},
       run_selective_scan,
       {6, 16}},
  };
}

}  // namespace ouzel
