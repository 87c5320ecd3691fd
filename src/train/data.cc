#include "src/train/data.h"

#include "src/base/hash.h"
#include "src/formats/files.h"

namespace ouzel {

std::int64_t training_bytes(std::int64_t bytes, double validation_share) {
  return bytes - static_cast<std::int64_t>(static_cast<double>(bytes) * validation_share);
}

TokenData::TokenData(const std::string& path, double validation_share)
    : text_(read_file(path)), training_size_(training_bytes(bytes(), validation_share)) {}

std::uint64_t TokenData::hash() const { return hash_bytes(text_.data(), text_.size()); }

void TokenData::window(std::int64_t begin, std::span<std::int32_t> tokens,
                       std::span<std::int32_t> targets) const {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::size_t at = static_cast<std::size_t>(begin) + i;
    tokens[i] = static_cast<unsigned char>(text_[at]);
    targets[i] = static_cast<unsigned char>(text_[at + 1]);
  }
}

}  // namespace ouzel
