// What the rows of the table share that call the recurrence: their tensors, and one way to run
// them.
#pragma once

#include <cstddef>
#include <functional>

#include "ouzel/recurrence.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry.h"
#include "src/ops/registry_rows.h"

namespace ouzel {

// Tensors of every matrix-state law without a normaliser.
inline const TensorInfo kQueryTensor = token_rows("q", "B T HQ K", "dq");
inline const TensorInfo kKeyTensor = token_rows("k", "B T HK K", "dk");
inline const TensorInfo kValueTensor = token_rows("v", "B T HV V", "dv");
inline const TensorInfo kInitialStateTensor = {"initial_state", "N HV K V", "dh0", true,
                                               "form!=parallel"};
inline const TensorInfo kOutputTensor = token_rows("o", "B T HO V", "do");
inline const TensorInfo kFinalStateTensor = {"final_state", "N HV K V", "dht", false,
                                             "form!=parallel"};
inline const TensorInfo kWeightsTensor = {"weights", "B HO T T", "", false, "form=parallel"};

Form form_of(const Attributes& attributes);

// A law of the recurrence: its forward and backward calls, bound to their options.
struct BoundLaw {
  std::function<std::size_t(const RecurrenceInputs&)> saved_bytes;
  std::function<void(const RecurrenceInputs&, const RecurrenceOutputs&)> forward;
  std::function<void(const RecurrenceInputs&, const void* saved, const RecurrenceOutputGrads&,
                     const RecurrenceInputGrads&)>
      backward;
  std::function<void(const RecurrenceInputs&, const StateView&, const Tensor& o)> step;
};

// Forward, and backward if the call wants it, of a law that takes q, k and v. A normalised law
// keeps z beside S.
void run_law(OperatorCall& call, const BoundLaw& law, bool normalized = false);
// The same of any inputs; states and segments are the call's.
void run_law(OperatorCall& call, const BoundLaw& law, RecurrenceInputs inputs,
             RecurrenceInputGrads grads, bool normalized = false);

}  // namespace ouzel
