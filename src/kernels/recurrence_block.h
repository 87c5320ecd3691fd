// Kernels of the engine (src/ops/rows.h has its recurrence): one row at a time, in any state.
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

// factor = e^g and, if it is not null, factor_minus_1 = e^g - 1: `count` numbers; g may be factor.
void decay_factors(Isa isa, std::int64_t count, const float* g, float* factor,
                   float* factor_minus_1);

// One row through a state of keys x columns. A factor of exactly 0 drops the decayed term, even
// NaN.
struct RowArgs {
  std::int64_t keys = 0, columns = 0;
  float* s = nullptr;
  float* residue = nullptr;  // not null: the sum is in two parts (without erase)
  std::int64_t key_stride = 0;

  // e^g and e^g - 1 (with a residue) of each key, or of all where decay_stride is 0.
  const float* decay = nullptr;
  const float* decay_minus_1 = nullptr;
  std::int64_t decay_stride = 0;
  const float* value_decay = nullptr;  // e^gv [columns], or null
  const float* value_decay_minus_1 = nullptr;

  const float* k = nullptr;
  const float* v = nullptr;
  const float* e = nullptr;  // null: no erase
  bool erase_decayed = true;
  const float* b = nullptr;  // null: the erase is collinear, with strength c
  const float* c = nullptr;
  std::int64_t strength_stride = 0;  // 1: c holds a number a column

  std::int64_t queries = 0;  // 0: the row is not read
  const float* q = nullptr;
  std::int64_t q_stride = 0;
  const float* u = nullptr;  // not null: reads before the decay, and (q . (u * k)) v is added
  float* o = nullptr;
  std::int64_t o_stride = 0;
};
void recurrence_row(Isa isa, const RowArgs& args);

}  // namespace ouzel
