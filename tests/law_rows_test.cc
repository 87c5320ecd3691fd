// Conversion of rows (src/kernels/law_rows.h) against the bit-level one of src/base/half.h.
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/half.h"
#include "src/kernels/law_rows.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

constexpr std::int64_t kRows = 3, kSize = 37, kPitch = 48, kStride = 41;

// Floats of every kind: of all magnitudes, ties, infinities, NaN.
std::vector<float> numbers() {
  Random random(11);
  std::vector<float> x(kRows * kPitch);
  for (float& value : x) {
    const std::uint64_t bits = random.bits();
    switch (bits >> 61) {
      case 0:
        value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        break;
      case 1:  // halfway between two bfloat16
        value = std::bit_cast<float>((static_cast<std::uint32_t>(bits) & 0xffff0000u) | 0x8000u);
        break;
      case 2:
        value = (bits & 1) != 0 ? INFINITY : -INFINITY;
        break;
      case 3:
        // With a payload of ones: rounding it as a number would carry into the sign.
        value = (bits & 1) != 0 ? NAN : std::bit_cast<float>(0x7fffffffu);
        break;
      case 4:  // halfway between two float16
        value = 1 + 0x1p-11f * static_cast<float>(1 + 2 * (bits & 1023));
        break;
      default:
        value = static_cast<float>(static_cast<std::int64_t>(bits)) * 0x1p-60f;
    }
    if (std::fpclassify(value) == FP_SUBNORMAL) value = 0;
  }
  return x;
}

template <class Element, class Round>
void expect_same_bits(DType dtype, Round round) {
  const std::vector<float> from = numbers();
  for (Isa isa : supported_isas()) {
    std::vector<Element> to(kRows * kStride, Element{0x1234});
    StoreRowsArgs store;
    store.from = from.data();
    store.pitch = kPitch;
    store.rows = kRows;
    store.size = kSize;
    store.to = to.data();
    store.dtype = dtype;
    store.stride = kStride;
    store_rows(isa, store);
    std::vector<float> back(kRows * kPitch, NAN);
    LoadRowsArgs load;
    load.from = to.data();
    load.dtype = dtype;
    load.stride = kStride;
    load.rows = kRows;
    load.size = kSize;
    load.factor = 2;
    load.to = back.data();
    load.pitch = kPitch;
    load_rows(isa, load);
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t i = 0; i < kPitch; ++i) {
        const float x = from[static_cast<std::size_t>(r * kPitch + i)];
        const float y = back[static_cast<std::size_t>(r * kPitch + i)];
        if (i < kStride) {
          const Element stored = to[static_cast<std::size_t>(r * kStride + i)];
          const Element want = i < kSize ? round(x) : Element{0x1234};
          // Which NaN it is is the processor's business.
          if (i < kSize && std::isnan(x)) {
            EXPECT_TRUE(std::isnan(to_float(stored))) << name_of(isa);
          } else {
            EXPECT_EQ(stored.bits, want.bits) << name_of(isa) << " " << x;
          }
        }
        if (i >= kSize) {
          EXPECT_EQ(y, 0);
        } else if (std::isnan(x)) {
          EXPECT_TRUE(std::isnan(y));
        } else {
          EXPECT_EQ(y, 2 * to_float(round(x))) << name_of(isa);
        }
      }
    }
  }
}

TEST(LawRows, BFloat16IsRoundedToNearestEven) {
  expect_same_bits<BFloat16>(DType::kBF16, [](float x) { return to_bf16(x); });
}

TEST(LawRows, Float16IsRoundedToNearestEven) {
  expect_same_bits<Float16>(DType::kF16, [](float x) { return to_f16(x); });
}

}  // namespace
}  // namespace ouzel::test
