#include "apps/ouzel/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <fmt/format.h>

#include "apps/ouzel/program.h"

namespace ouzel::app {
namespace {

constexpr std::size_t kBar = 24;

void put(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stderr); }

std::size_t columns() {
  struct winsize window = {};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 1;
  return known ? window.ws_col : 80;
}

}  // namespace

Progress::Progress(bool quiet) : quiet_(quiet), live_(!quiet && ::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { erase(); }

std::string Progress::fitted(const std::vector<std::string>& parts) const {
  std::string text;
  for (const std::string& part : parts) {
    const std::string more = (text.empty() ? "" : "  ") + part;
    if (live_ && text.size() + more.size() > columns() - 1) break;
    text += more;
  }
  return text;
}

void Progress::draw(std::int64_t done, std::int64_t total, const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  const bool due = now - last_ >= std::chrono::milliseconds(100) || done == total;
  if (!live_ || !due) return;
  last_ = now;
  // The bar takes what the text leaves of the line: one that wraps could not be drawn over.
  const std::size_t room = columns() - 1;
  const std::size_t bar = text.size() + 3 > room ? 0 : std::min(kBar, room - text.size() - 3);
  std::string row;
  if (total > 0 && bar >= 4) {
    const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    const auto filled = static_cast<std::size_t>(share * static_cast<double>(bar));
    row = fmt::format("[{:<{}}] ", std::string(filled, '='), bar);
  }
  row += text;
  row.resize(std::min(row.size(), room));
  put("\r\x1b[K" + row);
  drawn_ = true;
}

void Progress::line(const std::string& text) {
  erase();
  if (!quiet_) put(text + '\n');
}

void Progress::erase() {
  if (drawn_) put("\r\x1b[K");
  drawn_ = false;
}

std::string human_seconds(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(std::clamp(seconds, 0.0, 1e9)));
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace ouzel::app
