// Sizes of this machine's caches: they decide how much work goes together, never what its results
// are.
#pragma once

#include <cstdint>

namespace ouzel {

// Bytes of a core's second-level cache; 1 MiB where the system does not say.
std::int64_t second_level_cache_bytes();
// Whether it holds less than the rows and states of some heads, which then live in the third level.
inline bool small_second_level_cache() { return second_level_cache_bytes() < (1 << 20); }

}  // namespace ouzel
