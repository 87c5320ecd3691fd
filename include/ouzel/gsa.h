// Gated slot attention (Y. Zhang et al., arXiv:2409.07146): M slots of memory, read like attention.
//
//     hk' = hk Diag(e^g) + k s^T;  p = softmax(hk'^T (scale q));  hv' = Diag(e^g) hv + s v^T;
//     o = hv'^T p
#pragma once

#include <optional>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct GsaOptions {
  std::optional<double> scale = {};  // default K^-0.5
};

// q [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V], s and g [B, T, H, M], o [B, T, HQ, V]; states hk
// [N, H, K, M] and hv [N, H, M, V]. HQ is a multiple of H: query head h reads slots of head h / (HQ
// / H). Rows of tokens are float32, bfloat16 or float16, each tensor its own, the rest float32; any
// strides with unit last stride; final states may be the memory of the initial ones.
//
// g is a natural logarithm, at most 0 (up to 1e-6 counts as 0, more is an error and leaves outputs
// unspecified); -inf empties the slot. Computed in float64 within a call: exact to the rounding of
// its outputs and states.
struct GsaInputs {
  ConstTensor q = {}, k = {}, v = {}, s = {}, g = {};
  ConstTensor hk0 = {}, hv0 = {};      // absent: zeros
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

struct GsaOutputs {
  Tensor o = {};
  Tensor hkt = {}, hvt = {};  // absent: not wanted
};

OUZEL_EXPORT void gsa(Context& context, const GsaOptions& options, const GsaInputs& inputs,
                      const GsaOutputs& outputs);

// Upstream gradients; absent ones of states are zeros.
struct GsaOutputGrads {
  ConstTensor o = {}, hkt = {}, hvt = {};
};
// Assigned; absent ones are not computed.
struct GsaInputGrads {
  Tensor q = {}, k = {}, v = {}, s = {}, g = {}, hk0 = {}, hv0 = {};
};
OUZEL_EXPORT void gsa_backward(Context& context, const GsaOptions& options, const GsaInputs& inputs,
                               const GsaOutputGrads& output_grads,
                               const GsaInputGrads& input_grads);

// One token of N sequences: `inputs` with T = 1 and no states or segments; states in place.
OUZEL_EXPORT void gsa_step(Context& context, const GsaOptions& options, const GsaInputs& inputs,
                           const Tensor& hk, const Tensor& hv, const Tensor& o);

}  // namespace ouzel
