// A context of each instruction set of the machine.
#pragma once

#include <vector>

#include "ouzel/context.h"

namespace ouzel::test {

inline std::vector<Context> contexts() {
  std::vector<Context> list;
  for (Isa isa : supported_isas()) {
    list.push_back(Context({.threads = 2, .isa = isa, .poison_scratch = true}));
  }
  return list;
}

}  // namespace ouzel::test
