// The project's own golden files (tests/golden, written by scripts/make_golden.py).
#include <gtest/gtest.h>

#include "tests/golden.h"

namespace ouzel::test {
namespace {

const std::string kFolder = OUZEL_SOURCE_DIR "/tests/golden";

TEST(Golden, ReferencesAgreeToFloat64) {
  int files = 0;
  for (const std::string& path : golden_files(kFolder)) {
    SCOPED_TRACE(path);
    const GoldenFile f = load_golden(path);
    const auto results = reference_results(f);
    ASSERT_TRUE(results.has_value());
    expect_golden(f, *results, kFloat64);
    ++files;
  }
  EXPECT_GE(files, 100);
}

TEST(Golden, OperatorsAgreeToFloat32) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const std::string& path : golden_files(kFolder)) {
      SCOPED_TRACE(testing::Message() << name_of(isa) << " " << path);
      const GoldenFile f = load_golden(path);
      const std::optional<Call> call = table_call_of(f);
      ASSERT_TRUE(call.has_value());
      expect_golden(f, run_by_table(context, *call), bounds_on(isa, kFloat32));
    }
  }
}

}  // namespace
}  // namespace ouzel::test
