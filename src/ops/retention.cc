#include "ouzel/retention.h"

#include <cmath>

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
