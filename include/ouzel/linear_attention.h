// Linear attention (arXiv:2006.16236): S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t),
// o_t = S_t^T (scale phi(q_t)), divided by z_t . (scale phi(q_t)) + eps if normalised. Non-causal:
// S and z are the sums over the whole sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "ouzel/feature_map.h"
#include "ouzel/recurrence.h"

namespace ouzel {

struct LinearAttentionOptions {
  FeatureMap feature_map = {};
  // default: K^-0.5 for the identity map, else 1 (docs/numerics.md)
  std::optional<double> scale = {};
  bool normalize = false;
  std::optional<double> eps = {};  // default: the map's own, see docs/numerics.md
  bool causal = true;
  bool reverse = false;  // tokens are processed from last to first; o stays at the token's position
  Form form = Form::kAuto;
};

// Shapes as in recurrence.h, with F features in place of K for states. Throws
// Error(kInvalidArgument) for shapes, types and options that do not fit.
OUZEL_EXPORT void linear_attention(Context& context, const LinearAttentionOptions& options,
                                   const RecurrenceInputs& inputs,
                                   const RecurrenceOutputs& outputs);

// `saved` is what the forward call filled (null: recomputed). `map_grads` may be null.
OUZEL_EXPORT void linear_attention_backward(Context& context, const LinearAttentionOptions& options,
                                            const RecurrenceInputs& inputs, const void* saved,
                                            const RecurrenceOutputGrads& output_grads,
                                            const RecurrenceInputGrads& input_grads,
                                            const FeatureMapGrads* map_grads);

// One token of N sequences: q, k, v and o are [N, 1, H, D] (batch row n is sequence n); the state
// is updated in place. Causal only. Allocates nothing once the context has seen the shape.
OUZEL_EXPORT void linear_attention_step(Context& context, const LinearAttentionOptions& options,
                                        const ConstTensor& q, const ConstTensor& k,
                                        const ConstTensor& v, const StateView& state,
                                        const Tensor& o);

// Bytes of `saved` for a call of these inputs.
OUZEL_EXPORT std::size_t linear_attention_saved_bytes(const LinearAttentionOptions& options,
                                                      const RecurrenceInputs& inputs);

}  // namespace ouzel
