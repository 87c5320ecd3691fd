// JSON with limits: depth (64) and size are bounded, errors name the file and the place.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace ouzel {

using Json = nlohmann::json;

// Throws Error(kBadFile) naming `what` (a file's path) for text that is not JSON or nests too deeply.
Json parse_json(std::string_view text, const std::string& what);

}  // namespace ouzel
