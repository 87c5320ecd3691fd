// The larger set of golden files, in the folder that OUZEL_SHARED names (or ../shared): the files
// of the operators that exist here. Without the folder there is nothing to compare with; with it, a
// missing index or file is a failure.
#include <cstdlib>
#include <filesystem>

#include <gtest/gtest.h>

#include "tests/golden.h"

namespace ouzel::test {
namespace {

std::string shared_folder() {
  const char* given = std::getenv("OUZEL_SHARED");
  return given != nullptr && *given != '\0' ? given : OUZEL_SOURCE_DIR "/../shared";
}

class SharedGolden : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(shared_folder())) GTEST_SKIP() << "skipped: no shared data";
    for (const std::string& path : golden_files(shared_folder() + "/golden/dev")) {
      files_.push_back(load_golden(path));
    }
    ASSERT_GE(files_.size(), 60u);
  }
  std::vector<GoldenFile> files_;
};

TEST_F(SharedGolden, ReferencesAgreeToFloat64) {
  int compared = 0;
  for (const GoldenFile& f : files_) {
    SCOPED_TRACE(f.path);
    const auto results = reference_results(f);
    if (!results) continue;
    // Of a single token the quotient hardly depends on q and k.
    const bool flat = f.op() == "rebased" && f.tensor("q").extent(1) == 1;
    expect_golden(f, *results, kFloat64, flat ? kQuotientFloor : kFloor);
    ++compared;
  }
  EXPECT_GE(compared, 235);
}

TEST_F(SharedGolden, OperatorsAgreeToFloat32) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const GoldenFile& f : files_) {
      SCOPED_TRACE(testing::Message() << name_of(isa) << " " << f.path);
      const std::optional<Call> call = table_call_of(f);
      if (call) expect_golden(f, run_by_table(context, *call), bounds_on(isa, kFloat32));
    }
  }
}

}  // namespace
}  // namespace ouzel::test
