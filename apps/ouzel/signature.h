// The tensors of an operator on one line: names, shapes, gradients, conditions.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "src/ops/registry.h"

namespace ouzel::app {

// The letters of its shape, digits too.
std::set<std::string> letters_of(const TensorInfo& tensor);
std::string signature(const std::vector<TensorInfo>& tensors, bool gradients);

}  // namespace ouzel::app
