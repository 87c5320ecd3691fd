// The row of the short convolution.
#include "ouzel/short_conv.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

void run_short_conv(OperatorCall& call) {
  const ShortConvOptions options = {.activation = call.attributes().text("activation") == "silu"
                                                      ? ConvActivation::kSilu
                                                      : ConvActivation::kNone};
  const ShortConvInputs inputs = {.x = call.in("x"),
                                  .weight = call.in("weight"),
                                  .bias = call.in("bias"),
                                  .initial_state = call.in("initial_state"),
                                  .segments = call.segments()};
  if (call.steps()) {
    call.begin_states();
    short_conv_step(call.context(), options, inputs.x, inputs.weight, inputs.bias,
                    call.out("final_state"), call.out("o"));
    return;
  }
  if (call.wants_outputs()) {
    short_conv(call.context(), options, inputs, call.out("o"), call.out("final_state"));
  }
  if (!call.backward()) return;
  short_conv_backward(call.context(), options, inputs, call.in("do"), call.in("dht"),
                      call.out("dx"), call.out("dweight"), call.out("dbias"), call.out("dh0"));
}

}  // namespace

std::vector<OperatorInfo> short_conv_rows() {
  return {
      {"short_conv",
       {},
       "y_t = act(bias + sum_j weight[:, j] x_{t-W+1+j}); the state is the last W inputs",
       "arXiv:2212.14052",
       {token_rows("x", "B T D", "dx"),
        {"weight", "D W|D 1 W", "dweight"},
        {"bias", "D", "dbias", true},
        {"initial_state", "N D W", "dh0", true}},
       {token_rows("o", "B T D", "do"), {"final_state", "N D W", "dht"}},
       {{"activation", kText, "Applied to the sum", "none", {"none", "silu"}}, kCuSeqlensAttribute},
       run_short_conv},
  };
}

}  // namespace ouzel
