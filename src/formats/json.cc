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

// Watches the parser's events: a repeated key would otherwise silently win over the first. In a
// pass of its own: nlohmann's parser with a callback looks through an object from its beginning
// whenever one within it ends.
class Watch final : public nlohmann::json_sax<Json> {
 public:
  explicit Watch(const std::string& what) : what_(what) {}

  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& key) override {
    if (keys_.back().insert(key).second) return true;
    throw Error(ErrorKind::kBadFile,
                fmt::format("{}: JSON key '{}' stands twice in one object", what_, printable(key)));
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(Json::number_integer_t) override { return true; }
  bool number_unsigned(Json::number_unsigned_t) override { return true; }
  bool number_float(Json::number_float_t, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }
  // The parser that makes the values says what is wrong.
  bool parse_error(std::size_t, const std::string&, const Json::exception&) override {
    return false;
  }

 private:
  bool open() {
    if (keys_.size() == kMaxDepth) {
      throw Error(ErrorKind::kBadFile,
                  fmt::format("{}: JSON nests deeper than {} levels", what_, kMaxDepth));
    }
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& what_;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
};

}  // namespace

Json parse_json(std::string_view text, const std::string& what) {
  Watch watch(what);
  try {
    Json::sax_parse(text, &watch);
    return Json::parse(text);
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
