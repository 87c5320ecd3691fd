// AdamW against the formula in float64 over many steps, and the gradient norm.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/ops/adamw.h"
#include "tests/compare.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using Vector = std::vector<float>;

Vector random_vector(std::int64_t n, std::uint64_t seed, double range = 1) {
  Random random(seed);
  return random_array<float>(random, {n}, -range, range).data;
}

class AdamWTest : public testing::TestWithParam<Isa> {
 protected:
  Context context_{{.threads = 2, .isa = GetParam(), .poison_scratch = true}};
};

TEST_P(AdamWTest, FollowsTheFormula) {
  for (std::int64_t n : {0, 1, 15, 16, 17, 100, 40000}) {
    SCOPED_TRACE(n);
    AdamWOptions options;
    options.learning_rate = 3e-3;
    options.gradient_scale = 0.125;
    const auto size = static_cast<std::size_t>(n);
    Vector p = random_vector(n, 1), m(size), v(size);
    std::vector<double> tp(p.begin(), p.end()), tm(size), tv(size);
    for (std::int64_t step = 1; step <= 20; ++step) {
      const Vector g = random_vector(n, 10 + static_cast<std::uint64_t>(step), 4);
      adamw_step(context_, options, step, p, g, m, v);
      for (std::size_t i = 0; i < size; ++i) {
        const double gradient = 0.125 * g[i];
        tm[i] = 0.9 * tm[i] + 0.1 * gradient;
        tv[i] = 0.95 * tv[i] + 0.05 * gradient * gradient;
        const double t = static_cast<double>(step);
        const double mhat = tm[i] / (1 - std::pow(0.9, t)), vhat = tv[i] / (1 - std::pow(0.95, t));
        tp[i] -= 3e-3 * (0.1 * tp[i] + mhat / (std::sqrt(vhat) + 1e-8));
      }
    }
    const auto array = [&](const auto& data) {
      reference::Array<typename std::decay_t<decltype(data)>::value_type> a({n});
      a.data = data;
      return a;
    };
    Comparison comparison;
    comparison.output("p", array(p), array(tp));
    comparison.output("m", array(m), array(tm));
    comparison.output("v", array(v), array(tv));
    comparison.expect_within(kFloat32);
  }
}

TEST_P(AdamWTest, CutsAndThreadsChangeNoBit) {
  const std::int64_t n = 70000;
  const Vector g = random_vector(n, 2);
  const Vector start = random_vector(n, 1);
  Vector p = start, m(n), v(n);
  for (std::int64_t step = 1; step <= 3; ++step) adamw_step(context_, {}, step, p, g, m, v);
  Context single({.threads = 1, .isa = GetParam()});
  Vector q = start, mq(n), vq(n);
  for (std::int64_t step = 1; step <= 3; ++step) {
    for (std::size_t cut : {std::size_t{0}, std::size_t{33333}}) {
      const std::size_t count = cut == 0 ? 33333 : n - cut;
      adamw_step(single, {}, step, std::span(q).subspan(cut, count),
                 std::span(g).subspan(cut, count), std::span(mq).subspan(cut, count),
                 std::span(vq).subspan(cut, count));
    }
  }
  // Tails are masked vectors: where the cut falls changes no bit.
  EXPECT_EQ(std::memcmp(p.data(), q.data(), p.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(v.data(), vq.data(), v.size() * sizeof(float)), 0);
}

TEST_P(AdamWTest, SumOfSquaresIsFloat64AndFixed) {
  for (std::int64_t n : {0, 1, 15, 16, 17, 100, 16384, 16385, 100000}) {
    SCOPED_TRACE(n);
    const Vector x = random_vector(n, 3);
    double expected = 0;
    for (float f : x) expected += static_cast<double>(f) * f;
    const double sum = sum_of_squares(context_, x);
    EXPECT_NEAR(sum, expected, 1e-12 * expected);
    for (int threads : {1, 3, 5}) {
      Context context({.threads = threads, .isa = GetParam(), .poison_scratch = true});
      EXPECT_EQ(sum_of_squares(context, x), sum);
    }
  }
  // Squares beyond the range of float32, small terms beside large ones, NaN.
  Vector wide(50000, 1e-10f);
  wide[7] = 1e30f;
  EXPECT_NEAR(sum_of_squares(context_, wide), 1e60, 1e54);
  wide[49999] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(sum_of_squares(context_, wide)));
  EXPECT_EQ(sum_of_squares(context_, Vector(10, std::numeric_limits<float>::infinity())),
            std::numeric_limits<double>::infinity());
}

TEST_P(AdamWTest, RefusesUnequalLengthsAndStepZero) {
  Vector a(3), b(4);
  EXPECT_THROW(adamw_step(context_, {}, 1, a, b, a, a), Error);
  EXPECT_THROW(adamw_step(context_, {}, 0, a, a, a, a), Error);
}

INSTANTIATE_TEST_SUITE_P(EachIsa, AdamWTest, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace ouzel::test
