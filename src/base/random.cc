#include "src/base/random.h"

#include <bit>
#include <cmath>
#include <numbers>

namespace ouzel {

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = UINT64_C(0xD2511F53) * counter[0];
    const std::uint64_t b = UINT64_C(0xCD9E8D57) * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

std::uint32_t Random::next() {
  const std::uint64_t block = position_ / 4;
  if (block != block_) {
    block_ = block;
    words_ =
        philox({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)},
               {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
  }
  return words_[position_++ % 4];
}

double Random::uniform() {
  const std::uint64_t high = next() >> 5, low = next() >> 6;  // 27 and 26 bits
  return static_cast<double>(high << 26 | low) * 0x1p-53;
}

std::uint64_t Random::below(std::uint64_t n) {
  // Draws of as many bits as n - 1 has, until one fits: fewer than two on average.
  const int shift = std::countl_zero(n - 1);
  while (true) {
    const std::uint64_t high = next(), low = next();
    const std::uint64_t value = shift == 64 ? 0 : (high << 32 | low) >> shift;
    if (value < n) return value;
  }
}

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * std::numbers::pi * uniform());
}

}  // namespace ouzel
