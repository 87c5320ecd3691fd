// Rows of floats in anyone's memory.
#pragma once

#include <cstdint>

namespace ouzel {

struct StridedRows {
  const float* first = nullptr;
  std::int64_t stride = 0;
  const float* at(std::int64_t i) const { return first + i * stride; }
};

}  // namespace ouzel
