// Attention with bounded-memory control (H. Peng et al., arXiv:2110.02488): M slots, each the
// average of keys and values over the past, weighted by e^s.
//
//     lse' = log(e^lse + e^s);  hk' = hk Diag(e^(lse - lse')) + k (e^(s - lse'))^T, hv' likewise;
//     p = softmax(hk'^T (scale q));  o = hv'^T p
#pragma once

#include <optional>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct AbcOptions {
  std::optional<double> scale = {};  // default K^-0.5
};

// q [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V], s (raw logits) [B, T, H, M], o [B, T, HQ, V];
// states hk [N, H, K, M], hv [N, H, M, V] and lse [N, H, M]. HQ is a multiple of H. Rows of tokens
// are float32, bfloat16 or float16, each tensor its own, the rest float32; any strides with unit
// last stride; final states may be the memory of the initial ones. Computed in float64 within a
// call: exact to the rounding of its outputs and states.
struct AbcInputs {
  ConstTensor q = {}, k = {}, v = {}, s = {};
  ConstTensor hk0 = {}, hv0 = {}, lse0 = {};  // absent: 0, 0 and -inf; all three or none
  const Segments* segments = nullptr;         // null: each batch row is one sequence
};

struct AbcOutputs {
  Tensor o = {};
  Tensor hkt = {}, hvt = {}, lset = {};  // absent: not wanted
};

OUZEL_EXPORT void abc(Context& context, const AbcOptions& options, const AbcInputs& inputs,
                      const AbcOutputs& outputs);

// Upstream gradients; absent ones of states are zeros, and the loss does not depend on lset.
struct AbcOutputGrads {
  ConstTensor o = {}, hkt = {}, hvt = {};
};
// Assigned; absent ones are not computed.
struct AbcInputGrads {
  Tensor q = {}, k = {}, v = {}, s = {}, hk0 = {}, hv0 = {}, lse0 = {};
};
OUZEL_EXPORT void abc_backward(Context& context, const AbcOptions& options, const AbcInputs& inputs,
                               const AbcOutputGrads& output_grads,
                               const AbcInputGrads& input_grads);

// One token of N sequences: `inputs` with T = 1 and no states or segments; states in place.
OUZEL_EXPORT void abc_step(Context& context, const AbcOptions& options, const AbcInputs& inputs,
                           const Tensor& hk, const Tensor& hv, const Tensor& lse, const Tensor& o);

}  // namespace ouzel
