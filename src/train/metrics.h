// metrics.jsonl: a line of JSON per iteration. Holds nothing that a second run would not repeat (no
// times), so that a resumed run leaves the same bytes as an unbroken one.
#pragma once

#include <cstdint>
#include <string>

#include "ouzel/train.h"

namespace ouzel {

// Whether a file is there that no run has written.
bool is_foreign_metrics(const std::string& path);

class Metrics {
 public:
  // Opens the file and cuts what stands behind `bytes`: lines of iterations that will be done
  // again.
  Metrics(const std::string& path, std::int64_t bytes);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void append(const TrainProgress& progress);
  // Makes the lines so far survive a crash of the machine.
  void sync();
  std::int64_t bytes() const { return bytes_; }

 private:
  std::string path_;
  int fd_ = -1;
  std::int64_t bytes_ = 0;
};

}  // namespace ouzel
