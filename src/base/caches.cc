#include "src/base/caches.h"

#include <unistd.h>

#include <algorithm>

namespace ouzel {

std::int64_t cache_bytes(int level) {
#ifdef _SC_LEVEL2_CACHE_SIZE
  constexpr int kNames[] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
  return std::max<std::int64_t>(0, ::sysconf(kNames[level - 1]));
#else
  return 0;
#endif
}

}  // namespace ouzel
