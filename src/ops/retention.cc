#include "ouzel/retention.h"

#include <cmath>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/ops/recurrence.h"

namespace ouzel {

const Law kRetentionLaw = {
    .name = "retention",
    .decay = DecayKind::kPerHead,
    .erase = EraseKind::kNone,
    .read = ReadKind::kAfterWrite,
    .normalizer = false,
    .default_log_decay =
        [](std::int64_t head) { return std::log1p(-std::exp2(-5.0 - static_cast<double>(head))); },
    .defaults = "scale K^-0.5, log_decay log(1 - 2^(-5-h))",
    .formula = "S_t = gamma_h S_{t-1} + k_t v_t^T, o_t = S_t^T (scale q_t)",
    .source = "arXiv:2307.08621",
};

namespace {

RecurrenceSpec spec_of(const RetentionOptions& options, const ConstTensor& q) {
  RecurrenceSpec spec;
  spec.law = &kRetentionLaw;
  spec.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(key_size(q))));
  spec.reverse = options.reverse;
  spec.form = options.form;
  spec.log_decay = options.log_decay;
  return spec;
}

}  // namespace

std::vector<double> lightning_log_decays(std::int64_t heads, std::int64_t layer,
                                         std::int64_t layers, LightningSlopes slopes) {
  if (heads < 1 || layer < 0 || layer >= layers) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("lightning_attention: {} heads, layer_idx {}, num_layers {}; there must be "
                    "a head, and layer_idx counts from 0 to below num_layers",
                    heads, layer, layers));
  }
  const double n = static_cast<double>(heads), l = static_cast<double>(layer),
               of = static_cast<double>(layers);
  std::vector<double> decays;
  for (std::int64_t i = 0; i < heads; ++i) {
    const double h = static_cast<double>(i);
    if (slopes == LightningSlopes::kLinear) {
      decays.push_back(-(8 / n) * (1 - l / of) * h);
    } else {
      // The rule divides by layers - 1: a model of one layer is taken as its first.
      const double depth = layers > 1 ? l / (of - 1) : 0;
      decays.push_back(-std::exp2(-8 * (h + 1) / n) * (1 - depth + 1e-5));
    }
  }
  return decays;
}

void retention(Context& context, const RetentionOptions& options, const RecurrenceInputs& inputs,
               const RecurrenceOutputs& outputs) {
  recurrence(context, spec_of(options, inputs.q), inputs, outputs);
}

void retention_backward(Context& context, const RetentionOptions& options,
                        const RecurrenceInputs& inputs, const void*,
                        const RecurrenceOutputGrads& output_grads,
                        const RecurrenceInputGrads& input_grads) {
  recurrence_backward(context, spec_of(options, inputs.q), inputs, output_grads, input_grads,
                      nullptr);
}

void retention_step(Context& context, const RetentionOptions& options, const ConstTensor& q,
                    const ConstTensor& k, const ConstTensor& v, const StateView& state,
                    const Tensor& o) {
  recurrence_step(context, spec_of(options, q), q, k, v, state, o);
}

std::size_t retention_saved_bytes(const RetentionOptions&, const RecurrenceInputs&) { return 0; }

}  // namespace ouzel
