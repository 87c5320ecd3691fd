#include "src/infer/stop_text.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

namespace ouzel {

StopText::StopText(std::vector<std::string> stops, std::string held)
    : stops_(std::move(stops)), held_(std::move(held)) {
  std::sort(stops_.begin(), stops_.end(),
            [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
}

bool StopText::push(char byte, std::string& out) {
  held_ += byte;
  for (const std::string& stop : stops_) {
    if (!held_.ends_with(stop)) continue;
    out.append(held_, 0, held_.size() - stop.size());
    held_.clear();
    return true;
  }
  // Shorter than the longest stop text before this byte, so this is short work.
  const auto may_begin_a_stop = [this](std::string_view text) {
    return std::any_of(stops_.begin(), stops_.end(),
                       [&](const std::string& stop) { return stop.starts_with(text); });
  };
  std::size_t certain = 0;
  while (certain < held_.size() && !may_begin_a_stop(std::string_view(held_).substr(certain))) {
    ++certain;
  }
  out.append(held_, 0, certain);
  held_.erase(0, certain);
  return false;
}

std::string StopText::take_held() { return std::exchange(held_, {}); }

}  // namespace ouzel
