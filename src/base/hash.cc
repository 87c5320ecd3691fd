#include "src/base/hash.h"

#include <bit>
#include <cstring>

#include <fmt/format.h>

namespace ouzel {
namespace {

constexpr std::uint64_t kOdd = UINT64_C(0x9E3779B97F4A7C15);  // 2^64 over the golden ratio

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

}  // namespace

std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t lane[4] = {mix(seed + 1), mix(seed + 2), mix(seed + 3), mix(seed + 4)};
  const char* at = static_cast<const char*>(data);
  std::uint64_t block[4];
  std::size_t left = bytes;
  for (; left >= sizeof(block); left -= sizeof(block), at += sizeof(block)) {
    std::memcpy(block, at, sizeof(block));
    for (int i = 0; i < 4; ++i) lane[i] = std::rotl((lane[i] ^ block[i]) * kOdd, 29);
  }
  std::memset(block, 0, sizeof(block));
  if (left != 0) std::memcpy(block, at, left);
  std::uint64_t hash = mix(seed ^ bytes);
  for (int i = 0; i < 4; ++i) {
    lane[i] = std::rotl((lane[i] ^ block[i]) * kOdd, 29);
    hash = mix(hash * kOdd + lane[i]);
  }
  return hash;
}

std::string hash_string(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

}  // namespace ouzel
