// Laws whose decay is one number a token and that neither erase nor gate: the tiles of the plain
// recurrence, over several heads a task, take their rows as they are (heads_scan.h).
#pragma once

#include "src/ops/law_call.h"

namespace ouzel {

// Whether a call is one of them.
bool law_scans_heads(const LawCall& call, const LawTensor& o);
// The forward pass of such a call, but for the positions of final states.
void law_heads_scan(Context& context, const LawCall& call, const RecurrenceInputs& inputs,
                    const RecurrenceOutputs& outputs, const LawTensor& o);

}  // namespace ouzel
