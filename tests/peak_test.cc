// The yardstick: every burst does the multiply-adds that it is timed for, and wider vectors are
// faster.
#include <vector>

#include <gtest/gtest.h>

#include "src/kernels/peak.h"

namespace ouzel {
namespace {

std::int64_t lanes(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return 16;
    case Isa::kAvx2:
      return 8;
    case Isa::kPortable:
      break;
  }
  return 4;
}

TEST(Peak, CountsItsMultiplyAdds) {
  for (Isa isa : supported_isas()) {
    for (std::int64_t rounds : {1, 7, 100'000}) {
      EXPECT_EQ(fma_burst(isa, rounds), 12 * lanes(isa) * rounds) << name_of(isa);
    }
  }
}

TEST(Peak, CountsItsDotProducts) {
  if (!has_bf16_dot()) GTEST_SKIP() << "this processor has no AVX512-BF16";
  for (std::int64_t rounds : {1, 7, 100'000}) {
    EXPECT_EQ(bf16_dot_burst(rounds), 12 * 16 * rounds);
  }
}

TEST(Peak, IsPlausible) {
  for (Isa isa : supported_isas()) {
    const double flops = fma_peak_flops(isa);
    EXPECT_GT(flops, 1e8) << name_of(isa);
    // Three vector ports at 7 GHz would do less than this.
    EXPECT_LT(flops, 3 * 2 * 7e9 * static_cast<double>(lanes(isa))) << name_of(isa);
  }
}

}  // namespace
}  // namespace ouzel
