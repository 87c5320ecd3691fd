#include "src/train/metrics.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/formats/json.h"

namespace ouzel {
namespace {

// What a run's file begins with.
constexpr std::string_view kBegin = "{\"iteration\":1,\"loss\":";

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw Error(ErrorKind::kIo, fmt::format("{}: cannot {}: {}", path, what, std::strerror(errno)));
}

}  // namespace

bool is_foreign_metrics(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string begin(kBegin.size(), '\0');
  file.read(begin.data(), static_cast<std::streamsize>(begin.size()));
  begin.resize(static_cast<std::size_t>(file.gcount()));
  return !kBegin.starts_with(begin);  // one that is cut short, even to nothing, is a run's
}

Metrics::Metrics(const std::string& path, std::int64_t bytes) : path_(path) {
  fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(path_, "open");
  struct stat info = {};
  if (fstat(fd_, &info) != 0) fail(path_, "examine");
  bytes_ = std::min<std::int64_t>(info.st_size, bytes);
  if (ftruncate(fd_, bytes_) != 0) fail(path_, "truncate");
}

Metrics::~Metrics() { close(fd_); }

void Metrics::append(const TrainProgress& progress) {
  nlohmann::ordered_json line;
  line["iteration"] = progress.iteration;
  line["loss"] = progress.loss;
  line["lr"] = progress.lr;
  line["grad_norm"] = progress.grad_norm;
  if (progress.validation_loss >= 0) line["validation_loss"] = progress.validation_loss;
  const std::string text = line.dump() + "\n";
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = pwrite(fd_, text.data() + done, text.size() - done, bytes_);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_, "write");
    done += static_cast<std::size_t>(n);
    bytes_ += n;
  }
}

void Metrics::sync() {
  if (fsync(fd_) != 0) fail(path_, "flush");
}

}  // namespace ouzel
