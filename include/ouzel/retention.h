// Retention (RetNet, arXiv:2307.08621): S_t = gamma_h S_{t-1} + k_t v_t^T, o_t = S_t^T (scale q_t),
// gamma_h = 1 - 2^(-5-h).
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "ouzel/recurrence.h"

namespace ouzel {

struct RetentionOptions {
  std::optional<double> scale;  // default K^-0.5
  // log gamma of the HV heads (<= 0); empty: log(1 - 2^(-5-h))
  std::span<const double> log_decay;
  bool reverse = false;
  Form form = Form::kAuto;
};

OUZEL_EXPORT void retention(Context& context, const RetentionOptions& options,
                            const RecurrenceInputs& inputs, const RecurrenceOutputs& outputs);
OUZEL_EXPORT void retention_backward(Context& context, const RetentionOptions& options,
                                     const RecurrenceInputs& inputs, const void* saved,
                                     const RecurrenceOutputGrads& output_grads,
                                     const RecurrenceInputGrads& input_grads);
// As linear_attention_step.
OUZEL_EXPORT void retention_step(Context& context, const RetentionOptions& options,
                                 const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                                 const StateView& state, const Tensor& o);
OUZEL_EXPORT std::size_t retention_saved_bytes(const RetentionOptions& options,
                                               const RecurrenceInputs& inputs);

}  // namespace ouzel
