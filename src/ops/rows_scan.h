// The engine, forward: a sequence of rows (src/ops/rows.h) through one state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "src/base/context_impl.h"
#include "src/ops/recurrence_pass.h"
#include "src/ops/rows.h"

namespace ouzel {

// A state of a task: several heads of a sequence go side by side, chunk by chunk, since the rows of
// heads are neighbours in memory. That changes nothing but the time.
struct ScanHead {
  RowSource* source = nullptr;
  StateMemory<const float> initial;
  StateMemory<float> final;  // may be the same memory
};

// Scratch that a task takes for `columns` columns of `heads` states.
std::size_t rows_scan_scratch(const RowsKind& kind, std::int64_t columns, std::int64_t heads = 1);

// Columns [column, column + columns) of states and of their outputs; `initial` and `final` are all
// of a state. Chunks begin at multiples of 16 tokens from the start of the sequence. `position`:
// tokens that the initial states have seen.
void rows_scan(Isa isa, const RowsKind& kind, std::span<const ScanHead> heads, std::int64_t column,
               std::int64_t columns, std::int64_t position, Scratch& scratch);
inline void rows_scan(Isa isa, const RowsKind& kind, RowSource& source, std::int64_t column,
                      std::int64_t columns, const StateMemory<const float>& initial,
                      std::int64_t position, const StateMemory<float>& final, Scratch& scratch) {
  const ScanHead head = {&source, initial, final};
  rows_scan(isa, kind, {&head, 1}, column, columns, position, scratch);
}

// One token (rows_per_token rows, `queries` queries) in place, one pass over the state, whose
// columns must be adjacent. o: [queries] rows, `o_stride` apart. scratch: rows_step_floats(kind)
// numbers.
std::int64_t rows_step_floats(const RowsKind& kind);
void rows_step(Isa isa, const RowsKind& kind, const LawRows& rows, const StateMemory<float>& state,
               std::int64_t position, float* o, std::int64_t o_stride, float* scratch);

}  // namespace ouzel
