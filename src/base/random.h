// Random numbers: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11). Counter-based: number i of a (seed, stream) is a pure function of the three, so a
// generator is saved by its position and any part of a sequence can be drawn on its own.
#pragma once

#include <array>
#include <cstdint>

namespace ouzel {

// The block function: 128 bits of counter, 64 bits of key.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key);

class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t stream = 0, std::uint64_t position = 0)
      : seed_(seed), stream_(stream), position_(position) {}

  std::uint32_t next();  // 32 bits
  double uniform();      // [0, 1), 53 bits; consumes two
  // [0, n) without bias, n >= 1; consumes two, and two more for each draw that is refused.
  std::uint64_t below(std::uint64_t n);
  // N(0, 1) by Box and Muller, one of the pair; consumes four.
  double normal();

  // 32-bit numbers consumed so far: with seed and stream the whole generator.
  std::uint64_t position() const { return position_; }
  std::uint64_t seed() const { return seed_; }
  std::uint64_t stream() const { return stream_; }

 private:
  std::uint64_t seed_, stream_, position_;
  std::uint64_t block_ = UINT64_MAX;  // of `words_`: number block_ * 4 and the three after it
  std::array<std::uint32_t, 4> words_{};
};

}  // namespace ouzel
