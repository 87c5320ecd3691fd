// Watches a text that arrives byte by byte for any of several texts that end it, and lets through
// what cannot be the beginning of one.
#pragma once

#include <string>
#include <vector>

namespace ouzel {

class StopText {
 public:
  // `held`: what an earlier watch for the same texts held.
  explicit StopText(std::vector<std::string> stops, std::string held = {});

  // Takes the next byte and appends to `out` what is now certain. True when a stop text is
  // complete: the longest that ends here is dropped, and what follows is a new text.
  bool push(char byte, std::string& out);
  // The end of what was pushed that a stop text may begin with.
  const std::string& held() const { return held_; }
  // Takes it out: what follows is a new text.
  std::string take_held();

 private:
  std::vector<std::string> stops_;
  std::string held_;
};

}  // namespace ouzel
