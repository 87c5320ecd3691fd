// The content part of a lambda layer (I. Bello, arXiv:2102.08602), not causal: keys are a softmax
// over positions, and a sequence becomes one linear map, applied to every query.
//
//     lambda = sum_u softmax_positions(k_u)^T v_u;  o = lambda^T q
#pragma once

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

// q [B, TQ, HQ, K], k [B, TK, U, K], v [B, TK, U, V], o [B, TQ, HQ, V]. Each tensor is float32,
// bfloat16 or float16; any strides with unit last stride. Computed in float64 within a call.
// Without keys outputs are 0.
struct LambdaLayerInputs {
  ConstTensor q = {}, k = {}, v = {};
  const Segments* segments = nullptr;      // of the queries; null: each batch row is one sequence
  const Segments* key_segments = nullptr;  // of the keys; null: those of the queries
};

OUZEL_EXPORT void lambda_layer(Context& context, const LambdaLayerInputs& inputs, const Tensor& o);

// Gradients are assigned; absent ones are not computed.
OUZEL_EXPORT void lambda_layer_backward(Context& context, const LambdaLayerInputs& inputs,
                                        const ConstTensor& d_o, const Tensor& dq, const Tensor& dk,
                                        const Tensor& dv);

}  // namespace ouzel
