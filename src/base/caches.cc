#include "src/base/caches.h"

#include <unistd.h>

namespace ouzel {

std::int64_t second_level_cache_bytes() {
  static const std::int64_t bytes = [] {
#ifdef _SC_LEVEL2_CACHE_SIZE
    const long size = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (size > 0) return static_cast<std::int64_t>(size);
#endif
    return std::int64_t{1} << 20;
  }();
  return bytes;
}

}  // namespace ouzel
