// The recurrence behind every law (ouzel/recurrence.h): forward, backward, step and the quadratic
// form. The fronts (linear_attention.cc, retention.cc) fill a RecurrenceSpec and call these.
#pragma once

#include <cstdint>
#include <span>

#include "ouzel/context.h"
#include "ouzel/feature_map.h"
#include "ouzel/recurrence.h"
#include "src/ops/law.h"

namespace ouzel {

struct RecurrenceSpec {
  const Law* law = nullptr;
  FeatureMap map;
  double scale = 1;
  double eps = 0;
  bool clamp = false;  // the denominator is max(sum, eps), not sum + eps
  bool normalize = false;
  bool causal = true;
  bool reverse = false;
  Form form = Form::kAuto;
  std::span<const double> log_decay;  // per value head; empty: the law's default
};

void recurrence(Context& context, const RecurrenceSpec& spec, const RecurrenceInputs& inputs,
                const RecurrenceOutputs& outputs);
void recurrence_backward(Context& context, const RecurrenceSpec& spec,
                         const RecurrenceInputs& inputs, const RecurrenceOutputGrads& output_grads,
                         const RecurrenceInputGrads& input_grads, const FeatureMapGrads* map_grads);
void recurrence_step(Context& context, const RecurrenceSpec& spec, const ConstTensor& q,
                     const ConstTensor& k, const ConstTensor& v, const StateView& state,
                     const Tensor& o);

// Size of the last axis of q, or 1 where q is no [B, T, H, K] (the checks refuse it later).
std::int64_t key_size(const ConstTensor& q);

}  // namespace ouzel
