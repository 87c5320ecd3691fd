// Reading of state files.
#pragma once

#include <cstdint>
#include <string>

#include "ouzel/model.h"

namespace ouzel {

// The position that the metadata of the state file `path` give as `text`. Throws Error(kBadFile).
std::int64_t position_in_file(const std::string& path, const std::string& text);

// See Model::load_state.
State load_state_file(const Network& network, const std::string& path, std::int64_t capacity);

}  // namespace ouzel
