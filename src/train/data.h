// Training data: the bytes of a file are the tokens; its last part is held back for validation.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace ouzel {

// Of so many bytes, those before the part that is held back.
std::int64_t training_bytes(std::int64_t bytes, double validation_share);

class TokenData {
 public:
  TokenData(const std::string& path, double validation_share);

  std::int64_t bytes() const { return static_cast<std::int64_t>(text_.size()); }
  std::int64_t training_size() const { return training_size_; }
  std::int64_t validation_size() const { return bytes() - training_size_; }
  std::uint64_t hash() const;

  // tokens[i] = byte begin + i, targets[i] = the byte after it.
  void window(std::int64_t begin, std::span<std::int32_t> tokens,
              std::span<std::int32_t> targets) const;

 private:
  std::string text_;
  std::int64_t training_size_ = 0;
};

}  // namespace ouzel
