// JSON with limits: depth is bounded (64), a key may stand once in an object, text must be UTF-8,
// and errors name the file and the place.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace ouzel {

using Json = nlohmann::json;

// Throws Error(kBadFile) naming `what` (a file's path) for text that is not JSON, nests too deeply
// or repeats a key.
Json parse_json(std::string_view text, const std::string& what);

}  // namespace ouzel
