#include "src/formats/json.h"

#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/text.h"

namespace ouzel {
namespace {

constexpr std::size_t kMaxDepth = 64;

// Watches the parser's events: a repeated key would otherwise silently win over the first.
class Watch {
 public:
  explicit Watch(const std::string& what) : what_(what) {}

  bool operator()(Json::parse_event_t event, Json& value) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        if (keys_.size() == kMaxDepth) {
          throw Error(ErrorKind::kBadFile,
                      fmt::format("{}: JSON nests deeper than {} levels", what_, kMaxDepth));
        }
        keys_.emplace_back();
        break;
      case Json::parse_event_t::object_end:
      case Json::parse_event_t::array_end:
        keys_.pop_back();
        break;
      case Json::parse_event_t::key: {
        const std::string& key = value.get_ref<const std::string&>();
        if (!keys_.back().insert(key).second) {
          throw Error(
              ErrorKind::kBadFile,
              fmt::format("{}: JSON key '{}' stands twice in one object", what_, printable(key)));
        }
        break;
      }
      case Json::parse_event_t::value:
        break;
    }
    return true;
  }

 private:
  const std::string& what_;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
};

}  // namespace

Json parse_json(std::string_view text, const std::string& what) {
  Watch watch(what);
  try {
    return Json::parse(
        text.begin(), text.end(),
        [&watch](int, Json::parse_event_t event, Json& value) { return watch(event, value); });
  } catch (const Json::exception& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ...": without the tag.
    std::string_view reason = e.what();
    if (const auto end = reason.find("] "); end != std::string_view::npos) {
      reason.remove_prefix(end + 2);
    }
    throw Error(ErrorKind::kBadFile, fmt::format("{}: not JSON: {}", what, printable(reason)));
  }
}

}  // namespace ouzel
