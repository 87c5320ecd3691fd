// Sizes of this machine's caches: they decide how much work goes together, never what its results
// are.
#pragma once

#include <cstdint>

namespace ouzel {

// Bytes of a cache of the first (data), second or third level as one core sees it; 0 where the
// system does not say.
std::int64_t cache_bytes(int level);

// Whether a second-level cache of so many bytes (1 MiB where the system does not say) holds less
// than the rows and states of some heads, which then live in the third level.
inline bool is_small_second_level(std::int64_t bytes) { return bytes != 0 && bytes < (1 << 20); }

}  // namespace ouzel
