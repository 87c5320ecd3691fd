#include "ouzel/linear_attention.h"

#include <cmath>

#include "src/ops/recurrence.h"

namespace ouzel {

const Law kLinearAttentionLaw = {
    .name = "linear_attention",
    .decay = DecayKind::kNone,
    .erase = EraseKind::kNone,
    .read = ReadKind::kAfterWrite,
    .normalizer = true,
    .default_log_decay = nullptr,
    .defaults =
        "identity: scale K^-0.5, eps 1e-10; elu1, relu: scale 1, eps 1e-6; "
        "elementwise_product: scale 1, eps 0",
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
  double scale = 1, eps = 0;
  switch (options.feature_map.kind) {
    case FeatureMapKind::kIdentity:
      scale = 1 / std::sqrt(static_cast<double>(key_size(q)));
      eps = 1e-10;
      break;
    case FeatureMapKind::kElu1:
    case FeatureMapKind::kRelu:
      eps = 1e-6;
      break;
    case FeatureMapKind::kElementwiseProduct:
      break;
  }
  spec.scale = options.scale.value_or(scale);
  spec.eps = options.eps.value_or(eps);
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
