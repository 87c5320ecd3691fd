#include "src/ops/rows64.h"

#include <fmt/format.h>

namespace ouzel {

std::int64_t group_of(const char* op, const char* many_name, std::int64_t many,
                      const char* few_name, std::int64_t few) {
  if (few > 0 && many % few == 0) return many / few;
  refuse(op, fmt::format("{} has {} heads and {} has {}; the first should be a multiple of the "
                         "second",
                         many_name, many, few_name, few));
}

}  // namespace ouzel
