// The project's own golden files (tests/golden, written by scripts/make_golden.py).
#include <gtest/gtest.h>

#include "tests/golden_check.h"

namespace ouzel::test {
namespace {

const std::string kFolder = OUZEL_SOURCE_DIR "/tests/golden";

TEST(Golden, ReferencesAgreeToFloat64) {
  int files = 0;
  for (const std::string& path : golden_files(kFolder)) {
    SCOPED_TRACE(path);
    const GoldenFile f = load_golden(path);
    ASSERT_TRUE(supported(f));
    expect_golden(f, run_reference(f), kFloat64);
    ++files;
  }
  EXPECT_GE(files, 60);
}

}  // namespace
}  // namespace ouzel::test
