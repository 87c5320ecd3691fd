// Retention (RetNet, arXiv:2307.08621): S_t = gamma_h S_{t-1} + k_t v_t^T, o_t = S_t^T (scale q_t),
// gamma_h = 1 - 2^(-5-h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ouzel/recurrence.h"

namespace ouzel {

struct RetentionOptions {
  std::optional<double> scale = {};  // default K^-0.5
  // log gamma of the HV heads (<= 0); empty: log(1 - 2^(-5-h))
  std::span<const double> log_decay = {};
  bool reverse = false;
  Form form = Form::kAuto;
};

// Lightning Attention (arXiv:2401.04658, arXiv:2501.08313) is retention with decays that follow
// from the number of heads and the layer's place among the layers.
enum class LightningSlopes {
  kLinear,     // -(8/H) (1 - l/L) h: flash-linear-attention's; head 0 does not decay
  kGeometric,  // -2^(-8(h+1)/H) (1 - l/(L-1) + 1e-5): of the MiniMax models
};
// For RetentionOptions::log_decay. Throws Error(kInvalidArgument) unless heads is at least 1 and
// layer is in [0, layers).
OUZEL_EXPORT std::vector<double> lightning_log_decays(std::int64_t heads, std::int64_t layer,
                                                      std::int64_t layers, LightningSlopes slopes);

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
