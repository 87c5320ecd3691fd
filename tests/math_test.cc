// Vector functions of src/kernels/math-inl.h against float64, at a stride over all floats of their
// range and at their corners, on every instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/math_test.cc"
#include "src/kernels/targets.h"
// targets.h comes first
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {

enum class Function { kExp, kExp2, kExpm1, kLog, kSigmoid, kSilu };

// y = f(x) for n elements, a multiple of 16.
void MathKernel(int function, const float* x, float* y, std::int64_t n) {
  const hn::ScalableTag<float> d;
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, x + i);
    auto r = v;
    switch (static_cast<Function>(function)) {
      case Function::kExp:
        r = math::exp(d, v);
        break;
      case Function::kExp2:
        r = math::exp2(d, v);
        break;
      case Function::kExpm1:
        r = math::expm1(d, v);
        break;
      case Function::kLog:
        r = math::log(d, v);
        break;
      case Function::kSigmoid:
        r = math::sigmoid(d, v);
        break;
      case Function::kSilu:
        r = math::silu(d, v);
        break;
    }
    hn::StoreU(r, d, y + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(MathKernel);
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> apply(Isa isa, int function, std::vector<float> x) {
  const std::size_t n = x.size();
  x.resize((n + 15) / 16 * 16);
  std::vector<float> y(x.size());
  OUZEL_DISPATCH(isa, MathKernel)
  (function, x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  y.resize(n);
  return y;
}

// Every 1,009th float of [low, high], both signs as they come.
std::vector<float> floats(float low, float high) {
  std::vector<float> list;
  auto positives = [&](float a, float b, float sign) {
    for (auto bits = std::bit_cast<std::uint32_t>(a); bits <= std::bit_cast<std::uint32_t>(b);
         bits += 1009) {
      list.push_back(sign * std::bit_cast<float>(bits));
    }
  };
  if (low < 0) positives(high < 0 ? -high : 0.0f, -low, -1.0f);
  if (high > 0) positives(low > 0 ? low : 0.0f, high, 1.0f);
  return list;
}

double ulp_of(double y) { return std::ldexp(1.0, std::max(std::ilogb(y), -126) - 23); }

template <class F>
double worst_ulp(Isa isa, int function, const std::vector<float>& x, F&& truth) {
  const std::vector<float> y = apply(isa, function, x);
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double t = truth(static_cast<double>(x[i]));
    if (std::abs(t) < 1.2e-38 && std::abs(y[i]) < 1.2e-38f) continue;  // subnormal
    if (t == 0 && y[i] == 0) continue;
    const double error = std::abs(y[i] - t) / ulp_of(t);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

TEST(Math, StaysWithinItsUlps) {
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    EXPECT_LE(worst_ulp(isa, 0, floats(-87.0f, 88.72f), [](double x) { return std::exp(x); }), 1.0);
    EXPECT_LE(worst_ulp(isa, 1, floats(-125.0f, 127.99f), [](double x) { return std::exp2(x); }),
              isa == Isa::kPortable ? 1.2 : 1.0);
    EXPECT_LE(worst_ulp(isa, 2, floats(-50.0f, 88.72f), [](double x) { return std::expm1(x); }),
              2.0);
    EXPECT_LE(worst_ulp(isa, 3, floats(1.2e-38f, 3.4e38f), [](double x) { return std::log(x); }),
              2.0);
    EXPECT_LE(
        worst_ulp(isa, 4, floats(-87.0f, 200.0f), [](double x) { return 1 / (1 + std::exp(-x)); }),
        3.0);
    EXPECT_LE(
        worst_ulp(isa, 5, floats(-80.0f, 200.0f), [](double x) { return x / (1 + std::exp(-x)); }),
        3.0);
  }
}

TEST(Math, IsRightAtItsCorners) {
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    const std::vector<float> x = {0.0f, -0.0f, kInf, -kInf, kNaN, 1000.0f, -1000.0f, 3e38f, -3e38f};
    const std::vector<std::vector<float>> expected = {
        {1, 1, kInf, 0, kNaN, kInf, 0, kInf, 0},
        {1, 1, kInf, 0, kNaN, kInf, 0, kInf, 0},
        {0, 0, kInf, -1, kNaN, kInf, -1, kInf, -1},
        {-kInf, -kInf, kInf, kNaN, kNaN, std::log(1000.0f), kNaN, std::log(3e38f), kNaN},
        {0.5f, 0.5f, 1, 0, kNaN, 1, 0, 1, 0},
        {0, 0, kInf, kNaN, kNaN, 1000, 0, 3e38f, 0}};
    for (int function = 0; function < 6; ++function) {
      const std::vector<float> y = apply(isa, function, x);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const float e = expected[static_cast<std::size_t>(function)][i];
        EXPECT_TRUE(y[i] == e || (std::isnan(e) && std::isnan(y[i])))
            << "function " << function << " of " << x[i] << " gives " << y[i] << ", not " << e;
      }
    }
  }
}

}  // namespace
}  // namespace ouzel
#endif  // HWY_ONCE
