// Efficient attention (Z. Shen et al., arXiv:1812.01243): o = rq(Q) (rk(K)^T V), with a factorised
// softmax (rq over the features of a token, rk over positions, a feature at a time) or scaling
// (both divided by sqrt(n), n the length of the sequence).
//
// Causal, the softmax over positions runs over those up to the token: a feature is the average of
// values over the past, weighted by e^k, and has its log of the sum of weights as a state.
#pragma once

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

enum class EfficientVariant { kSoftmax, kScaling };

struct EfficientAttentionOptions {
  EfficientVariant variant = EfficientVariant::kSoftmax;
  bool causal = false;  // softmax only
};

// q, k [B, T, H, K], v and o [B, T, H, V]; states S [N, H, K, V] and lse [N, H, K] of the causal
// form. Rows of tokens are float32, bfloat16 or float16, each tensor its own, the rest float32; any
// strides with unit last stride; final states may be the memory of the initial ones. Computed in
// float64 within a call: exact to the rounding of its outputs and states.
struct EfficientAttentionInputs {
  ConstTensor q = {}, k = {}, v = {};
  // absent: 0 and -inf; both or none; causal only
  ConstTensor initial_state = {}, initial_lse = {};
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

struct EfficientAttentionOutputs {
  Tensor o = {};
  Tensor final_state = {}, lse = {};  // absent: not wanted; causal only
};

OUZEL_EXPORT void efficient_attention(Context& context, const EfficientAttentionOptions& options,
                                      const EfficientAttentionInputs& inputs,
                                      const EfficientAttentionOutputs& outputs);

// Upstream gradients; that of the final state may be absent (zeros), and the loss does not depend
// on the final lse.
struct EfficientAttentionOutputGrads {
  ConstTensor o = {}, final_state = {};
};
// Assigned; absent ones are not computed.
struct EfficientAttentionInputGrads {
  Tensor q = {}, k = {}, v = {}, initial_state = {}, initial_lse = {};
};
OUZEL_EXPORT void efficient_attention_backward(Context& context,
                                               const EfficientAttentionOptions& options,
                                               const EfficientAttentionInputs& inputs,
                                               const EfficientAttentionOutputGrads& output_grads,
                                               const EfficientAttentionInputGrads& input_grads);

// One token of N sequences, q, k [N, 1, H, K], v and o [N, 1, H, V], causal; states in place.
OUZEL_EXPORT void efficient_attention_step(Context& context, const ConstTensor& q,
                                           const ConstTensor& k, const ConstTensor& v,
                                           const Tensor& state, const Tensor& lse, const Tensor& o);

}  // namespace ouzel
