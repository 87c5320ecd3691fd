#include "apps/ouzel/byte_source.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "apps/ouzel/program.h"
#include "ouzel/error.h"

namespace ouzel::app {

ByteSource::ByteSource(const std::string& path)
    : name_(path == "-" ? "stdin" : path), fd_(STDIN_FILENO), owned_(path != "-") {
  if (owned_) fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) {
    throw Error(ErrorKind::kIo, fmt::format("cannot open {}: {}", name_, std::strerror(errno)));
  }
}

ByteSource::~ByteSource() {
  if (owned_) ::close(fd_);
}

std::size_t ByteSource::read(std::span<char> to) {
  // A signal just before a blocking read would be noticed only after it: so wait in short turns.
  constexpr int kTurn = 200;  // milliseconds
  while (true) {
    check_interrupt();
    struct pollfd ready = {fd_, POLLIN, 0};
    const int events = ::poll(&ready, 1, kTurn);
    if (events == 0 || (events < 0 && errno == EINTR)) continue;
    const ssize_t got = ::read(fd_, to.data(), to.size());
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno != EINTR && errno != EAGAIN) {
      throw Error(ErrorKind::kIo, fmt::format("cannot read {}: {}", name_, std::strerror(errno)));
    }
  }
}

std::optional<std::size_t> ByteSource::size() const {
  struct stat info;
  if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  return static_cast<std::size_t>(info.st_size);
}

}  // namespace ouzel::app
