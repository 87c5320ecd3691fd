// The random numbers: the same anywhere.
#include "src/base/random.h"

#include <array>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace ouzel {
namespace {

TEST(Random, IsPhilox) {
  // Known answers of Random123's own test vectors (kat_vectors, philox4x32 10).
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<std::uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
  Random random(3, 4);
  std::vector<std::uint32_t> numbers;
  for (int i = 0; i < 20; ++i) numbers.push_back(random.next());
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(Random(3, 4, i).next(), numbers[i]);
  double sum = 0, squares = 0;
  std::vector<int> counts(7);
  for (int i = 0; i < 20000; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
    ++counts[random.below(7)];
  }
  EXPECT_NEAR(sum / 20000, 0, 0.03);
  EXPECT_NEAR(squares / 20000, 1, 0.05);
  for (int count : counts) EXPECT_NEAR(count, 20000 / 7, 250);
}

}  // namespace
}  // namespace ouzel
