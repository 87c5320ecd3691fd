// The tensors of an operator on one line: names, shapes, gradients, conditions.
#pragma once

#include <string>
#include <vector>

#include "src/ops/registry.h"

namespace ouzel::app {

std::string signature(const std::vector<TensorInfo>& tensors, bool gradients);

}  // namespace ouzel::app
