// The row of the gated norm.
#include <cstdint>

#include "src/ops/copy_tensor.h"
#include "src/ops/norm.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"
#include "src/ops/widened.h"

namespace ouzel {
namespace {

using enum AttributeKind;

// [B, T, H, D] as rows of H groups: batch rows from `b` on, all of them at once if they are evenly
// spaced.
template <class Void, class Any>
AnyView<Void, 3> rows(const Any& tensor, std::int64_t b, std::int64_t count) {
  AnyView<Void, 3> view;
  if (!tensor.present()) return view;
  view.data = AnyRows<Void>{tensor.data, 0, tensor.dtype}.from(b * tensor.stride[0]).first;
  view.dtype = tensor.dtype;
  view.extent = {count, tensor.extent[2], tensor.extent[3]};
  view.stride = {tensor.stride[1], tensor.stride[2], tensor.stride[3]};
  return view;
}

bool evenly_spaced(const ConstTensor& tensor) {
  return !tensor.present() || tensor.extent[0] == 1 ||
         tensor.stride[0] == tensor.extent[1] * tensor.stride[1];
}

// The kernel writes all gradients of a gated norm: memory for one that is not wanted.
Tensor or_scratch(const Tensor& wanted, const ConstTensor& like, bool needed, Array& scratch) {
  if (wanted.present() || !needed || !like.present()) return wanted;
  scratch = Array({like.extent[0], like.extent[1], like.extent[2], like.extent[3]}, like.dtype);
  return scratch.tensor;
}

void run_rms_norm(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  ConstTensor x = call.in("x"), gate = call.in("gate"), dy = call.in("do");
  const Tensor dweight = call.out("dweight");
  Array y_scratch, dx_scratch, dgate_scratch, weight_copy;
  Tensor y = or_scratch(call.wants_outputs() ? call.out("o") : Tensor(), x, true, y_scratch);
  Tensor dx = or_scratch(call.out("dx"), x, call.backward(), dx_scratch);
  Tensor dgate = or_scratch(call.out("dgate"), gate, call.backward(), dgate_scratch);
  // Rows of several types become float32.
  Widened wide(call.context());
  const auto differs = [&](const ConstTensor& t) { return t.present() && t.dtype != x.dtype; };
  if (differs(gate) || differs(dy) || differs(y) || differs(dx) || differs(dgate)) {
    for (ConstTensor* t : {&x, &gate, &dy}) *t = wide.in(*t);
    for (Tensor* t : {&y, &dx, &dgate}) *t = wide.out(*t);
  }
  ConstTensor weight = call.in("weight");
  if (weight.rank == 2 && weight.stride[0] != weight.extent[1]) {
    weight_copy = Array({weight.extent[0], weight.extent[1]});
    copy_tensor(call.context(), weight, weight_copy.tensor);
    weight = weight_copy.tensor;
  }
  const RmsNormOptions options = {.eps = static_cast<float>(attributes.number("eps").value()),
                                  .activation = attributes.text("activation") == "silu"
                                                    ? GateActivation::kSilu
                                                    : GateActivation::kSigmoid,
                                  .gate_first = attributes.flag("gate_first"),
                                  .weight_per_group = weight.rank == 2};

  bool even = true;
  for (const ConstTensor& t : {x, gate, dy, ConstTensor(y), ConstTensor(dx), ConstTensor(dgate)}) {
    even = even && evenly_spaced(t);
  }
  const std::int64_t count = (even ? x.extent[0] : 1) * x.extent[1];
  const Array rstd = call.backward() ? Array({count, x.extent[2]}) : Array();
  for (std::int64_t b = 0; b < (even ? 1 : x.extent[0]); ++b) {
    const auto x_rows = rows<const void>(x, b, count), gate_rows = rows<const void>(gate, b, count);
    const auto* w = static_cast<const float*>(weight.data);
    rms_norm(call.context(), options, x_rows, w, gate_rows, rows<void>(y, b, count),
             rstd.memory.f32());
    if (!call.backward()) continue;
    rms_norm_backward(call.context(), options, x_rows, w, gate_rows, rstd.memory.f32(),
                      rows<const void>(dy, b, count), rows<void>(dx, b, count),
                      rows<void>(dgate, b, count), static_cast<float*>(dweight.data));
  }
  wide.finish();
}

}  // namespace

std::vector<OperatorInfo> norm_rows() {
  return {
      {"rms_norm",
       {},
       "y = x (mean(x^2) + eps)^-1/2 weight act(gate); x act(gate) in place of x if gate_first",
       "arXiv:1910.07467",
       {token_rows("x", "B T H D", "dx"),
        {"weight", "D|H D", "dweight", true},
        token_rows("gate", "B T H D", "dgate", true)},
       {token_rows("o", "B T H D", "do")},
       {{"eps", kNumber, "Added to the mean", "1e-6", {}, kNotNegative},
        {"activation", kText, "Of the gate", "silu", {"silu", "sigmoid"}},
        {"gate_first", kFlag, "The gate multiplies x, as in Mamba-2, not the result", "false"}},
       run_rms_norm},
  };
}

}  // namespace ouzel
