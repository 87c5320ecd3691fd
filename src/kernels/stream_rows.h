// Rows out of scratch to where they belong, past the caches.
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

// Rows of whole cache lines, aligned to them. See finish_streams (recurrence.h).
struct StreamRowsArgs {
  const float* from = nullptr;
  std::int64_t from_pitch = 0;
  float* to = nullptr;
  std::int64_t to_stride = 0;  // may be negative
  std::int64_t rows = 0, size = 0;
};
void stream_rows(Isa isa, const StreamRowsArgs& args);

}  // namespace ouzel
