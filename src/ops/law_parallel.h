// The quadratic form of a law (ouzel/laws.h): o = weights v.
#pragma once

#include "src/ops/law_call.h"

namespace ouzel {

void law_parallel(Context& context, const LawCall& call, const RecurrenceInputs& inputs,
                  const RecurrenceOutputs& outputs, const LawTensor& o);

}  // namespace ouzel
