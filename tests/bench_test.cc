// What `ouzel bench` stands on: medians, ratios, the check of efficiencies, and the JSON it prints.
#include "bench/case.h"

#include <cmath>

#include <nlohmann/json.hpp>
#include <vector>

#include <gtest/gtest.h>

#include "bench/measure.h"
#include "bench/openblas.h"
#include "ouzel/error.h"
#include "src/kernels/peak.h"

namespace ouzel::bench {
namespace {

TEST(Bench, TakesMedians) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 100}), 3);
  EXPECT_EQ(median({7}), 7);
}

TEST(Bench, RatioIsTheOthersTimeOverOurs) {
  const auto rounds = [](std::int64_t n) { return [n] { fma_burst(Isa::kPortable, n); }; };
  const Row row = with_ratio({}, 9, rounds(100'000), rounds(1'000'000));
  EXPECT_GT(row.ratio.value(), 3);  // ten times the rounds, on a machine that others use too
  EXPECT_GT(row.ms, 0);
}

// The peak loop itself has an efficiency of about 1, half of its operations one of about a half.
TEST(Bench, EfficiencyIsOverThePeakOfTheSameInstructionSet) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 1, .isa = isa});
    const std::int64_t count = fma_burst(isa, 1);
    const auto burst = [&] { fma_burst(isa, 400'000); };
    const double flops = 2.0 * static_cast<double>(count) * 400'000;
    EXPECT_NEAR(with_efficiency({}, context, flops, 9, burst).efficiency.value(), 1, 0.3);
    EXPECT_NEAR(with_efficiency({}, context, flops / 2, 9, burst).efficiency.value(), 0.5, 0.2);
  }
}

TEST(Bench, AnEfficiencyAboveOneIsAFault) {
  Row row;
  EXPECT_TRUE(plausible(row));
  row.efficiency = 1.0;
  EXPECT_TRUE(plausible(row));
  row.efficiency = 1.01;
  EXPECT_FALSE(plausible(row));
  row.dtype = "bf16";
  EXPECT_TRUE(plausible(row));
}

TEST(Bench, AnErrorBeyondItsBoundIsAFault) {
  Row row;
  row.bound = 3e-5;
  row.error = 3e-5;
  EXPECT_TRUE(plausible(row));
  row.error = 3.1e-5;
  EXPECT_FALSE(plausible(row));
  row.error = std::nan("");
  EXPECT_FALSE(plausible(row));
}

TEST(Bench, OpenBlasMultipliesWithTheKernelsOfThisMachine) {
  const OpenBlas* blas = OpenBlas::get();
  if (blas == nullptr) GTEST_SKIP() << "OpenBLAS is not installed";
  if (supported_isas().front() != Isa::kPortable) {
    EXPECT_EQ(blas->core(), supported_isas().front() == Isa::kAvx512 ? "SkylakeX" : "Haswell");
  }
  // a [2, 3] b^T [3, 2], b [2, 3]; then the same from a^T and b^T, added.
  const float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, 2, 0, 1, 1};
  const float at[] = {1, 4, 2, 5, 3, 6}, bt[] = {1, 0, 0, 1, 2, 1};
  float c[4] = {};
  blas->sgemm(Transpose::kNo, Transpose::kYes, 2, 2, 3, a, b, 0, c);
  EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{7, 5, 16, 11}));
  blas->sgemm(Transpose::kYes, Transpose::kNo, 2, 2, 3, at, bt, 1, c);
  EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{14, 10, 32, 22}));
}

TEST(Bench, OpenBlasSolvesTriangularSystems) {
  const OpenBlas* blas = OpenBlas::get();
  if (blas == nullptr) GTEST_SKIP() << "OpenBLAS is not installed";
  const float l[] = {7, 7, 7, 2, 7, 7, 3, 4, 7};  // what is 7 is not read
  float x[] = {1, 2, 4, 5, 10, 20};
  blas->solve_unit_lower(Transpose::kNo, 3, 2, l, x);
  EXPECT_EQ(std::vector<float>(x, x + 6), (std::vector<float>{1, 2, 2, 1, -1, 10}));
  float y[] = {8, 15, 6, 9, 1, 2};
  blas->solve_unit_lower(Transpose::kYes, 3, 2, l, y);
  EXPECT_EQ(std::vector<float>(y, y + 6), (std::vector<float>{1, 7, 2, 1, 1, 2}));
}

// The comparator computes what it is compared to: rows say by how much the two differ.
TEST(Bench, ChunksOfMatrixProductsAreTheLaws) {
  if (OpenBlas::get() == nullptr) GTEST_SKIP() << "OpenBLAS is not installed";
  int forms = 0;
  for (const Case& one : operator_cases()) {
    if (!one.name.ends_with("_chunked/64")) continue;
    for (const Row& row : one.run({.runs = 1})) {
      EXPECT_TRUE(plausible(row)) << row.op << ": " << row.error.value();
      EXPECT_TRUE(row.error.has_value()) << row.op;
    }
    ++forms;
  }
  EXPECT_EQ(forms, 2 * 7);
}

TEST(Bench, ResultsAreConsumed) {
  EXPECT_NO_THROW(Data(1, {3, 5}).consume("data"));
  EXPECT_THROW(Data::empty({3, 5}).consume("data"), Error);
  EXPECT_THROW(Data(1, {3, 5}, 0).consume("data"), Error);
}

TEST(Bench, JsonHasTheKeysOfEveryRow) {
  Row efficiency{.op = "linear_attention",
                 .pass = "forward",
                 .variant = "identity",
                 .threads = 1,
                 .B = 1,
                 .H = 16,
                 .T = 2048,
                 .K = 64,
                 .V = 128,
                 .ms = 4,
                 .gflops = 130,
                 .peak_gflops = 170,
                 .efficiency = 0.76};
  Row ratio{.op = "gemm", .pass = "backward", .ms = 7, .ratio = 1.1};
  const auto json = nlohmann::json::parse(as_json({efficiency, ratio}));
  const auto& rows = json.at("rows");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].at("op"), "linear_attention");
  EXPECT_EQ(rows[0].at("pass"), "forward");
  EXPECT_EQ(rows[0].at("dtype"), "f32");
  EXPECT_EQ(rows[0].at("threads"), 1);
  EXPECT_EQ(rows[0].at("V"), 128);
  EXPECT_EQ(rows[0].at("efficiency"), 0.76);
  EXPECT_FALSE(rows[0].contains("ratio"));
  EXPECT_EQ(rows[1].at("ratio"), 1.1);
  EXPECT_FALSE(rows[1].contains("efficiency"));
}

}  // namespace
}  // namespace ouzel::bench
