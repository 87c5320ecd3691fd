// The engine, forward: a sequence of rows (src/ops/rows.h) through one state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/context_impl.h"
#include "src/ops/recurrence_pass.h"
#include "src/ops/rows.h"

namespace ouzel {

// Scratch that a task takes for `columns` columns of a state.
std::size_t rows_scan_scratch(const RowsKind& kind, std::int64_t columns);

// Columns [column, column + columns) of a state and of its outputs; `initial` and `final`, which
// may be the same memory, are all of the state. Chunks begin at multiples of 16 tokens from the
// start of the sequence. `position`: tokens that `initial` has seen.
void rows_scan(Isa isa, const RowsKind& kind, RowSource& source, std::int64_t column,
               std::int64_t columns, const StateMemory<const float>& initial, std::int64_t position,
               const StateMemory<float>& final, Scratch& scratch);

// One token (rows_per_token rows, `queries` queries) in place, one pass over the state, whose
// columns must be adjacent. o: [queries] rows, `o_stride` apart. scratch: rows_step_floats(kind)
// numbers.
std::int64_t rows_step_floats(const RowsKind& kind);
void rows_step(Isa isa, const RowsKind& kind, const LawRows& rows, const StateMemory<float>& state,
               std::int64_t position, float* o, std::int64_t o_stride, float* scratch);

}  // namespace ouzel
