// What layers register themselves with while a network is built.
#pragma once

#include <vector>

#include "ouzel/model.h"
#include "src/layers/parameters.h"
#include "src/layers/state.h"

namespace ouzel {

class Linear;

struct Builder {
  const ModelConfig& config;
  ParameterTable& table;
  StateLayout& state;
  std::vector<Linear*>& linears;  // whose matrices are packed when the weights have changed
};

}  // namespace ouzel
