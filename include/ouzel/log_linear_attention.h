// Log-linear attention (H. Guo et al., arXiv:2506.04761): gated linear attention with a ladder of
// states, one for each power of two of the past, and weights for its levels.
//
//     o_t = sum_(s<=t) lambda_t[level(t, s)] e^(g_(s+1) + ... + g_t) (scale q_t . k_s) v_s
//
// level(t, t) = 0, otherwise 1 + the highest bit in which the positions t and s differ.
#pragma once

#include <cstdint>
#include <span>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

struct LogLinearAttentionOptions {
  double scale = 1;
};

// q, k [B, T, HK, K], v and o [B, T, H, V], g [B, T, H], level_scales (lambda) [B, T, H, L]; H is a
// multiple of HK: head j reads queries and keys of head j / (H / HK). L must reach the highest
// level of the longest sequence. Rows of tokens are float32, bfloat16 or float16, each tensor its
// own, the rest float32; any strides with unit last stride.
//
// g is a natural logarithm, at most 0 (up to 1e-6 counts as 0, more is an error and leaves outputs
// unspecified); -inf forgets everything. Computed in float64 within a call, in T log T.
struct LogLinearAttentionInputs {
  ConstTensor q = {}, k = {}, v = {}, g = {}, level_scales = {};
  const Segments* segments = nullptr;  // null: each batch row is one sequence
};

OUZEL_EXPORT void log_linear_attention(Context& context, const LogLinearAttentionOptions& options,
                                       const LogLinearAttentionInputs& inputs, const Tensor& o);

// Assigned; absent ones are not computed. Levels that no pair has get 0.
struct LogLinearAttentionInputGrads {
  Tensor q = {}, k = {}, v = {}, g = {}, level_scales = {};
};
OUZEL_EXPORT void log_linear_attention_backward(Context& context,
                                                const LogLinearAttentionOptions& options,
                                                const LogLinearAttentionInputs& inputs,
                                                const ConstTensor& d_o,
                                                const LogLinearAttentionInputGrads& grads);

// One token of N sequences at the given positions (tokens seen so far, [N]): `inputs` with T = 1
// and no segments. state [N, H, L - 1, K, V] is updated in place; its entries need no initial
// value.
OUZEL_EXPORT void log_linear_attention_step(Context& context,
                                            const LogLinearAttentionOptions& options,
                                            const LogLinearAttentionInputs& inputs,
                                            std::span<const std::int64_t> positions,
                                            const Tensor& state, const Tensor& o);

}  // namespace ouzel
