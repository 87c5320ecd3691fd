// A context of each instruction set of the machine.
#pragma once

#include <utility>
#include <vector>

#include "ouzel/context.h"
#include "src/base/context_impl.h"

namespace ouzel::test {

inline std::vector<Context> contexts(int threads = 2) {
  std::vector<Context> list;
  for (Isa isa : supported_isas()) {
    list.push_back(Context({.threads = threads, .isa = isa, .poison_scratch = true}));
  }
  return list;
}

// As on a machine whose second-level cache is small where this one's is large, or the other way.
inline Context with_other_cache(ContextOptions options) {
  Context context(std::move(options));
  context.impl().set_small_second_level_cache(!context.impl().small_second_level_cache());
  return context;
}

}  // namespace ouzel::test
