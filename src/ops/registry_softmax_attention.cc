// The row of softmax attention.
#include "ouzel/softmax_attention.h"
#include "src/base/half.h"
#include "src/ops/copy_tensor.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

void run_softmax_attention(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  const SoftmaxAttentionOptions options = {.scale = attributes.number("scale"),
                                           .causal = attributes.flag("causal"),
                                           .window = attributes.integer("window_size").value_or(0),
                                           .q_offset = attributes.integer("q_offset").value_or(0)};
  const SoftmaxAttentionInputs inputs = {
      .q = call.in("q"), .k = call.in("k"), .v = call.in("v"), .segments = call.segments()};
  Array lse, wide;
  // The backward pass reads outputs that nothing has rounded.
  Tensor o = call.out("o");
  if (call.backward() && is_half(o.dtype)) {
    wide = Array::unset({o.extent[0], o.extent[1], o.extent[2], o.extent[3]});
    o = wide.tensor;
  }
  if (call.backward())
    lse = Array::unset({call.extent("B"), call.extent("TQ"), call.extent("HQ")}, DType::kF64);
  softmax_attention(call.context(), options, inputs, {.o = o, .lse = lse.tensor});
  if (!call.backward()) return;
  if (is_half(call.out("o").dtype)) copy_tensor(call.context(), o, call.out("o"));
  softmax_attention_backward(call.context(), options, inputs, o, lse.tensor, call.in("do"),
                             call.out("dq"), call.out("dk"), call.out("dv"));
}

}  // namespace

std::vector<OperatorInfo> softmax_attention_rows() {
  return {
      {"softmax_attention",
       {"attention"},
       "o_i = sum_j softmax_j(scale q_i . k_j) v_j; causal: j <= i + q_offset; window_size w: "
       "i + q_offset - j < w",
       "arXiv:1706.03762, arXiv:2205.14135",
       {token_rows("q", "B TQ HQ K", "dq"), token_rows("k", "B TK HK K", "dk"),
        token_rows("v", "B TK HK V", "dv")},
       {token_rows("o", "B TQ HQ V", "do")},
       {kScaleAttribute,
        {"causal", kFlag, "A query sees no later key", "true"},
        {"window_size",
         kInteger,
         "Keys that a query sees, the current one included (default, or 0: all)",
         "",
         {},
         kNotNegative},
        {"q_offset", kInteger, "Position of the first query among the keys", "0"},
        kCuSeqlensAttribute},
       run_softmax_attention},
  };
}

}  // namespace ouzel
