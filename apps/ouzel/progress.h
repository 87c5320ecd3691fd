// Live progress on stderr: one line that is redrawn on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace ouzel::app {

class Progress {
 public:
  explicit Progress(bool quiet);
  ~Progress();  // takes the redrawn line away
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  bool live() const { return live_; }
  // Parts of a text, the most important first, together: on a terminal as many as a line has room
  // for.
  std::string fitted(const std::vector<std::string>& parts) const;
  // A bar for `done` of `total` (0: not known) and `text`, ten times a second at most; on a
  // terminal only.
  void draw(std::int64_t done, std::int64_t total, const std::string& text);
  // A line that stays.
  void line(const std::string& text);

 private:
  void erase();

  bool quiet_, live_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

// "48 s", "3:07", "2:15:00".
std::string human_seconds(double seconds);

}  // namespace ouzel::app
