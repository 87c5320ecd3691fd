// The engine, backward: gradients of the rows (src/ops/rows.h) of one state, of its initial state,
// and from its final state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/context_impl.h"
#include "src/ops/recurrence_pass.h"
#include "src/ops/rows.h"

namespace ouzel {

// Scratch that a task takes for a sequence of `tokens`. `kept`: whether the forward pass kept
// states for it.
std::size_t rows_backward_scratch(const RowsKind& kind, std::int64_t tokens, bool kept);

// States are recomputed from those that are kept at the begin of each chunk, by the forward pass or
// else by a first pass of its own; never by subtraction.
// `position`: tokens that `initial` has seen.
void rows_backward(Isa isa, const RowsKind& kind, RowSource& source, RowAdjoint& adjoint,
                   const StateMemory<const float>& initial, std::int64_t position,
                   const StateMemory<const float>& final_grad,
                   const StateMemory<float>& initial_grad, Scratch& scratch);

}  // namespace ouzel
