// A file, or stdin for "-", read piece by piece: pipes without end, and Ctrl-C while one is silent.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace ouzel::app {

class ByteSource {
 public:
  // Throws Error(kIo) naming the file.
  explicit ByteSource(const std::string& path);
  ~ByteSource();
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  // What there is, at least one byte: waits for it. 0 at the end. Throws Error(kIo), and
  // Error(kCancelled) when interrupted.
  std::size_t read(std::span<char> to);
  // The length of a regular file.
  std::optional<std::size_t> size() const;

 private:
  std::string name_;
  int fd_;
  bool owned_;
};

}  // namespace ouzel::app
