// 16-bit floats against an independent reading of the formats: every pattern one way, and the other
// way every midpoint between neighbours with its surroundings.
#include "src/base/half.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/context.h"
#include "src/kernels/convert.h"

namespace ouzel {
namespace {

// The value that a pattern means, by the definition of the format.
double meaning(std::uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = static_cast<int>(bits & ((1u << mantissa_bits) - 1));
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const double sign = (bits >> (exponent_bits + mantissa_bits) & 1) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

TEST(Half, EveryPatternHasItsMeaningAndComesBack) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const float half = to_float(Float16{pattern});
    const float brain = to_float(BFloat16{pattern});
    const double half_meaning = meaning(bits, 5, 10);
    const double brain_meaning = meaning(bits, 8, 7);
    if (std::isnan(half_meaning)) {
      EXPECT_TRUE(std::isnan(half)) << bits;
      EXPECT_TRUE(std::isnan(to_float(to_f16(half)))) << bits;
    } else {
      ASSERT_EQ(half, half_meaning) << bits;
      ASSERT_EQ(std::signbit(half), std::signbit(half_meaning)) << bits;
      ASSERT_EQ(to_f16(half).bits, bits);
    }
    if (std::isnan(brain_meaning)) {
      EXPECT_TRUE(std::isnan(brain)) << bits;
      EXPECT_TRUE(std::isnan(to_float(to_bf16(brain)))) << bits;
    } else {
      ASSERT_EQ(brain, brain_meaning) << bits;
      ASSERT_EQ(to_bf16(brain).bits, bits);
    }
  }
}

// Between two neighbouring patterns: below the midpoint rounds down, above it up, the midpoint
// itself to the even one. The pattern after the largest finite one is infinity, which serves as
// 2^(max + 1).
template <class To>
void check_rounding(To convert, std::uint16_t largest_finite, int exponent_bits,
                    int mantissa_bits) {
  for (std::uint32_t bits = 0; bits <= largest_finite; ++bits) {
    const double low = meaning(bits, exponent_bits, mantissa_bits);
    double high = meaning(bits + 1, exponent_bits, mantissa_bits);
    if (std::isinf(high)) high = 2 * low - meaning(bits - 1, exponent_bits, mantissa_bits);
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(middle, (low + high) / 2) << "a midpoint must be a float";
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    const std::uint32_t sign = 1u << (exponent_bits + mantissa_bits);
    ASSERT_EQ(convert(middle), even);
    ASSERT_EQ(convert(-middle), even | sign);
    ASSERT_EQ(convert(std::nextafter(middle, 0.0f)), bits);
    ASSERT_EQ(convert(-std::nextafter(middle, 0.0f)), bits | sign);
    ASSERT_EQ(convert(std::nextafter(middle, HUGE_VALF)), bits + 1);
  }
}

TEST(Half, RoundsToNearestTiesToEven) {
  check_rounding([](float x) -> std::uint32_t { return to_f16(x).bits; }, 0x7bff, 5, 10);
  check_rounding([](float x) -> std::uint32_t { return to_bf16(x).bits; }, 0x7f7f, 8, 7);
}

TEST(Half, OverflowsToInfinityAndKeepsNaN) {
  EXPECT_EQ(to_f16(1e30f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-HUGE_VALF).bits, 0xfc00);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(to_bf16(-HUGE_VALF).bits, 0xff80);
  EXPECT_EQ(to_f16(std::numeric_limits<float>::denorm_min()).bits, 0);
  // A NaN whose payload lies in the bits that are cut off must not become infinity.
  const float nan = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(to_float(to_bf16(nan))));
  EXPECT_TRUE(std::isnan(to_float(to_f16(nan))));
}

// Arrays of every pattern, at odd addresses and of odd lengths, give the bits that numbers give.
TEST(Half, ArraysAreConvertedAsNumbersAre) {
  for (const DType type : {DType::kBF16, DType::kF16}) {
    const auto narrow = [&](float x) -> std::uint32_t {
      return type == DType::kBF16 ? to_bf16(x).bits : to_f16(x).bits;
    };
    const auto widen = [&](std::uint16_t bits) {
      return type == DType::kBF16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
    };
    std::vector<std::uint16_t> halves(0x10000);
    std::vector<float> floats;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      halves[bits] = static_cast<std::uint16_t>(bits);
      // Around each half: below, at and above it, and at the middle between it and the next.
      for (const std::uint32_t low :
           {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
        floats.push_back(std::bit_cast<float>(bits << 16 | low));
      }
    }
    for (Isa isa : supported_isas()) {
      SCOPED_TRACE(name_of(isa));
      for (const std::size_t skip : {0u, 1u, 3u}) {
        const std::size_t n = halves.size() - 7 * skip;
        std::vector<float> wide(n + 1, 7.0f);
        convert(isa, type, halves.data() + skip, DType::kF32, wide.data(), std::ssize(wide) - 1);
        for (std::size_t i = 0; i < n; ++i) {
          const float expected = widen(halves[i + skip]);
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(wide[i])) << i;
          } else {
            ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(expected))
                << i;
          }
        }
        EXPECT_EQ(wide[n], 7.0f);
        const std::size_t m = floats.size() - 7 * skip;
        std::vector<std::uint16_t> back(m + 1, 7);
        convert(isa, DType::kF32, floats.data() + skip, type, back.data(), std::ssize(back) - 1);
        for (std::size_t i = 0; i < m; ++i) {
          if (std::isnan(floats[i + skip])) {
            ASSERT_TRUE(std::isnan(widen(back[i]))) << i;
          } else {
            ASSERT_EQ(back[i], narrow(floats[i + skip])) << floats[i + skip];
          }
        }
        EXPECT_EQ(back[m], 7);
      }
    }
  }
}

}  // namespace
}  // namespace ouzel
