// The quadratic form of the recurrence, with the T x T weights on request: to look at, and as a
// cross-check of the scan.
#pragma once

#include "src/ops/recurrence_shape.h"

namespace ouzel {

void recurrence_parallel(Context& context, const RecurrenceSpec& spec, const RecurrenceShape& shape,
                         const RecurrenceInputs& inputs, const RecurrenceOutputs& outputs);

}  // namespace ouzel
