#include "ouzel/linear_attention.h"

#include <cmath>

#include "src/ops/feature_map.h"
#include "src/ops/recurrence.h"

namespace ouzel {

const Law kLinearAttentionLaw = {
    .name = "linear_attention",
    .decay = DecayKind::kNone,
    .erase = EraseKind::kNone,
    .read = ReadKind::kAfterWrite,
    .normalizer = true,
    .default_log_decay = nullptr,
    .defaults = "scale 1, identity and dpfp K^-0.5; eps by feature map",
    .formula =
        "S_t = S_{t-1} + phi(k_t) v_t^T, z_t = z_{t-1} + phi(k_t), o_t = S_t^T (scale "
        "phi(q_t)), divided by z_t . (scale phi(q_t)) + eps if normalised",
    .source = "arXiv:2006.16236",
};

namespace {

RecurrenceSpec spec_of(const LinearAttentionOptions& options, const ConstTensor& q) {
  RecurrenceSpec spec;
  spec.law = &kLinearAttentionLaw;
  spec.map = options.feature_map;
  const FeatureMapInfo& map = info_of(options.feature_map.kind);
  const double root = 1 / std::sqrt(static_cast<double>(key_size(q)));
  spec.scale = options.scale.value_or(map.unit_scale ? 1 : root);
  spec.eps = options.eps.value_or(map.eps);
  spec.clamp = map.clamp;
  spec.normalize = options.normalize;
  spec.causal = options.causal;
  spec.reverse = options.reverse;
  spec.form = options.form;
  return spec;
}

}  // namespace

void linear_attention(Context& context, const LinearAttentionOptions& options,
                      const RecurrenceInputs& inputs, const RecurrenceOutputs& outputs) {
  recurrence(context, spec_of(options, inputs.q), inputs, outputs);
}

void linear_attention_backward(Context& context, const LinearAttentionOptions& options,
                               const RecurrenceInputs& inputs, const void*,
                               const RecurrenceOutputGrads& output_grads,
                               const RecurrenceInputGrads& input_grads,
                               const FeatureMapGrads* map_grads) {
  recurrence_backward(context, spec_of(options, inputs.q), inputs, output_grads, input_grads,
                      map_grads);
}

void linear_attention_step(Context& context, const LinearAttentionOptions& options,
                           const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                           const StateView& state, const Tensor& o) {
  recurrence_step(context, spec_of(options, q), q, k, v, state, o);
}

std::size_t linear_attention_saved_bytes(const LinearAttentionOptions&, const RecurrenceInputs&) {
  return 0;
}

}  // namespace ouzel
