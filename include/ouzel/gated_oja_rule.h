// The gated Oja rule: an error-correcting memory whose erase and gates act on the value side.
//
//     R = S Diag(e^gv);  S' = R + beta (k - R v) v^T;  o = S'^T (scale q)
#pragma once

#include <optional>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct GatedOjaRuleOptions {
  std::optional<double> scale = {};                 // default K^-0.5
  bool use_q_l2norm = false, use_k_l2norm = false;  // x := x / sqrt(|x|^2 + l2norm_eps)
  double l2norm_eps = 1e-6;
};

// q, k [B, T, H, K], v and o [B, T, HV, V], beta [B, T, HV], gv [B, T, HV, V]; states [N, HV, K,
// V]. HV is a multiple of H: value head j reads queries and keys of head j / (HV / H). Rows of
// tokens are float32, bfloat16 or float16, each tensor its own, the rest float32; any strides with
// unit last stride; final states may be the memory of the initial ones.
//
// gv is a natural logarithm, at most 0 (up to 1e-6 counts as 0, more is an error and leaves outputs
// unspecified); -inf drops the column. Values should have unit length. Computed in float64 within a
// call: exact to the rounding of its outputs and states.
struct GatedOjaRuleInputs {
  ConstTensor q = {}, k = {}, v = {}, beta = {};
  ConstTensor gv = {};                 // absent: no decay
  ConstTensor initial_state = {};      // absent: zeros
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

OUZEL_EXPORT void gated_oja_rule(Context& context, const GatedOjaRuleOptions& options,
                                 const GatedOjaRuleInputs& inputs, const Tensor& o,
                                 const Tensor& final_state);

// Gradients are assigned; absent ones are not computed. d_final may be absent (zeros).
struct GatedOjaRuleInputGrads {
  Tensor q = {}, k = {}, v = {}, beta = {}, gv = {}, initial_state = {};
};
OUZEL_EXPORT void gated_oja_rule_backward(Context& context, const GatedOjaRuleOptions& options,
                                          const GatedOjaRuleInputs& inputs, const ConstTensor& d_o,
                                          const ConstTensor& d_final,
                                          const GatedOjaRuleInputGrads& grads);

// One token of N sequences: `inputs` with T = 1 and no states or segments; the state in place.
OUZEL_EXPORT void gated_oja_rule_step(Context& context, const GatedOjaRuleOptions& options,
                                      const GatedOjaRuleInputs& inputs, const Tensor& state,
                                      const Tensor& o);

}  // namespace ouzel
