// The row of the gated norm.
#include <cstdint>

#include "src/ops/copy_tensor.h"
#include "src/ops/norm.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

using enum AttributeKind;

// [B, T, H, D] as rows of H groups: batch rows from `b` on, all of them at once if they are evenly
// spaced.
template <class T, class Any>
View<T, 3> rows(const Any& tensor, std::int64_t b, std::int64_t count) {
  if (!tensor.present()) return {};
  const View<T, 4> v = tensor.template view<T, 4>();
  return {v(b), {count, v.extent[2], v.extent[3]}, {v.stride[1], v.stride[2], v.stride[3]}};
}

bool evenly_spaced(const ConstTensor& tensor) {
  return !tensor.present() || tensor.extent[0] == 1 ||
         tensor.stride[0] == tensor.extent[1] * tensor.stride[1];
}

// The kernel writes all gradients of a gated norm: memory for one that is not wanted.
Tensor or_scratch(const Tensor& wanted, const ConstTensor& like, bool needed, Array& scratch) {
  if (wanted.present() || !needed || !like.present()) return wanted;
  scratch = Array({like.extent[0], like.extent[1], like.extent[2], like.extent[3]});
  return scratch.tensor;
}

void run_rms_norm(OperatorCall& call) {
  const Attributes& attributes = call.attributes();
  const ConstTensor x = call.in("x"), gate = call.in("gate"), dy = call.in("do");
  const Tensor y = call.out("o"), dweight = call.out("dweight");
  Array dx_scratch, dgate_scratch, weight_copy;
  const Tensor dx = or_scratch(call.out("dx"), x, call.backward(), dx_scratch);
  const Tensor dgate = or_scratch(call.out("dgate"), gate, call.backward(), dgate_scratch);
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
    const auto x_rows = rows<const float>(x, b, count),
               gate_rows = rows<const float>(gate, b, count);
    const auto* w = static_cast<const float*>(weight.data);
    rms_norm(call.context(), options, x_rows, w, gate_rows, rows<float>(y, b, count),
             rstd.memory.f32());
    if (!call.backward()) continue;
    rms_norm_backward(call.context(), options, x_rows, w, gate_rows, rstd.memory.f32(),
                      rows<const float>(dy, b, count), rows<float>(dx, b, count),
                      rows<float>(dgate, b, count), static_cast<float*>(dweight.data));
  }
}

}  // namespace

std::vector<OperatorInfo> norm_rows() {
  return {
      {"rms_norm",
       {},
       "y = x (mean(x^2) + eps)^-1/2 weight act(gate); x act(gate) in place of x if gate_first",
       "arXiv:1910.07467",
       {{"x", "B T H D", "dx"},
        {"weight", "D|H D", "dweight", true},
        {"gate", "B T H D", "dgate", true}},
       {{"o", "B T H D", "do"}},
       {{"eps", kNumber, "Added to the mean", "1e-6", {}, kNotNegative},
        {"activation", kText, "Of the gate", "silu", {"silu", "sigmoid"}},
        {"gate_first", kFlag, "The gate multiplies x, as in Mamba-2, not the result", "false"}},
       run_rms_norm},
  };
}

}  // namespace ouzel
