// RMSNorm and its gradients against float64, and its promises bit for bit.
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/ops/norm.h"
#include "tests/compare.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using reference::Array;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kEps = 1e-5f;

struct Call {
  std::int64_t rows, groups, size;
  bool has_weight, has_gate;
  Array<float> x, weight, gate, dy;

  Call(std::int64_t rows, std::int64_t groups, std::int64_t size, bool has_weight, bool has_gate)
      : rows(rows), groups(groups), size(size), has_weight(has_weight), has_gate(has_gate) {
    Random random(7);
    x = random_array<float>(random, {rows, groups, size}, -2, 2);
    dy = random_array<float>(random, {rows, groups, size});
    gate = random_array<float>(random, {rows, groups, size}, -4, 4);
    weight = random_array<float>(random, {size}, 0.5, 1.5);
  }
};

template <class Real>
struct Outcome {
  Array<Real> y, rstd, dx, dgate, dweight;
};

template <class T>
View<T, 3> view(T* data, const Array<float>& a) {
  return {data, {a.extent(0), a.extent(1), a.extent(2)}};
}

Outcome<float> run(Context& context, const Call& c) {
  Outcome<float> r;
  r.y = Array<float>::like(c.x);
  r.dx = Array<float>::like(c.x);
  r.rstd = Array<float>({c.rows, c.groups});
  for (auto* a : {&r.y, &r.dx, &r.rstd}) std::fill(a->data.begin(), a->data.end(), kNaN);
  r.dgate = c.has_gate ? r.y : Array<float>();
  r.dweight = Array<float>({c.size});
  const auto in = [](const Array<float>& a) { return view(a.data.data(), a); };
  const View<const float, 3> gate = c.has_gate ? in(c.gate) : View<const float, 3>();
  const float* weight = c.has_weight ? c.weight.data.data() : nullptr;
  rms_norm(context, in(c.x), weight, kEps, gate, view(r.y.data.data(), r.y), r.rstd.data.data());
  rms_norm_backward(
      context, in(c.x), weight, gate, r.rstd.data.data(), in(c.dy), view(r.dx.data.data(), r.dx),
      c.has_gate ? view(r.dgate.data.data(), r.dgate) : View<float, 3>(), r.dweight.data.data());
  return r;
}

// y_i = x_i r f_i with r = (mean(x^2) + eps)^-1/2 and f = w silu(g); dr / dx_k = -r^3 x_k / D.
Outcome<double> truth(const Call& c) {
  Outcome<double> t;
  const std::vector<std::int64_t> shape{c.rows, c.groups, c.size};
  t.y = Array<double>(shape);
  t.dx = Array<double>(shape);
  if (c.has_gate) t.dgate = Array<double>(shape);
  t.rstd = Array<double>({c.rows, c.groups});
  t.dweight = Array<double>({c.size});
  for (std::int64_t n = 0; n < c.rows; ++n) {
    for (std::int64_t h = 0; h < c.groups; ++h) {
      double mean = 0, sum = 0;
      for (std::int64_t i = 0; i < c.size; ++i) mean += std::pow(c.x(n, h, i), 2.0);
      const double r = 1 / std::sqrt(mean / static_cast<double>(c.size) + kEps);
      t.rstd(n, h) = r;
      const auto factor = [&](std::int64_t i, double w) {
        const double g = c.gate(n, h, i);
        return w * (c.has_gate ? g / (1 + std::exp(-g)) : 1);
      };
      const auto weight = [&](std::int64_t i) {
        return c.has_weight ? static_cast<double>(c.weight(i)) : 1;
      };
      for (std::int64_t i = 0; i < c.size; ++i) {
        const double x = c.x(n, h, i), dy = c.dy(n, h, i), g = c.gate(n, h, i);
        t.y(n, h, i) = x * r * factor(i, weight(i));
        sum += dy * x * factor(i, weight(i));
        if (c.has_weight) t.dweight(i) += dy * x * r * factor(i, 1);
        if (c.has_gate) {
          const double s = 1 / (1 + std::exp(-g));
          t.dgate(n, h, i) = dy * x * r * weight(i) * (s + g * s * (1 - s));
        }
      }
      for (std::int64_t k = 0; k < c.size; ++k) {
        t.dx(n, h, k) = c.dy(n, h, k) * r * factor(k, weight(k)) -
                        sum * std::pow(r, 3.0) * c.x(n, h, k) / static_cast<double>(c.size);
      }
    }
  }
  return t;
}

bool same_bits(const Array<float>& a, const Array<float>& b) {
  return a.data.size() == b.data.size() &&
         (a.data.empty() ||
          std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0);
}

class NormTest : public testing::TestWithParam<Isa> {
 protected:
  Context context_{{.threads = 2, .isa = GetParam(), .poison_scratch = true}};
};

TEST_P(NormTest, AgreesWithFloat64) {
  for (std::int64_t size : {1, 2, 3, 15, 16, 17, 31, 33, 60, 64, 100, 384}) {
    for (std::int64_t rows : {0, 1, 3, 130}) {
      for (int variant = 0; variant < 4; ++variant) {
        const Call c(rows, rows == 3 ? 5 : 1, size, variant % 2 == 0, variant / 2 == 0);
        SCOPED_TRACE(testing::Message() << rows << " rows of " << size << ", variant " << variant);
        const Outcome<float> got = run(context_, c);
        const Outcome<double> expected = truth(c);
        Comparison comparison;
        comparison.output("y", got.y, expected.y);
        comparison.output("rstd", got.rstd, expected.rstd);
        // One feature alone is its own norm: the gradient is eps over x^3, a difference of equals.
        if (size > 1) comparison.gradient("dx", got.dx, expected.dx);
        comparison.gradient("dweight", got.dweight, expected.dweight);
        if (c.has_gate) comparison.gradient("dgate", got.dgate, expected.dgate);
        comparison.expect_within(kFloat32);
      }
    }
  }
}

TEST_P(NormTest, ThreadsChangeNoBit) {
  const Call c(1000, 3, 65, true, true);
  const Outcome<float> first = run(context_, c);
  for (int threads : {1, 3, 5}) {
    Context context({.threads = threads, .isa = GetParam(), .poison_scratch = true});
    const Outcome<float> again = run(context, c);
    EXPECT_TRUE(same_bits(again.y, first.y));
    EXPECT_TRUE(same_bits(again.dx, first.dx));
    EXPECT_TRUE(same_bits(again.dgate, first.dgate));
    EXPECT_TRUE(same_bits(again.dweight, first.dweight));
  }
}

TEST_P(NormTest, RowsDoNotDependOnTheirCompany) {
  const Call c(300, 2, 100, true, true);
  const Outcome<float> all = run(context_, c);
  for (std::int64_t row : {0, 1, 17, 299}) {
    Call one(1, 2, 100, true, true);
    one.weight = c.weight;
    const auto copy = [&](const Array<float>& from, Array<float>& to) {
      std::copy_n(&from(row, 0, 0), 200, to.data.begin());
    };
    copy(c.x, one.x);
    copy(c.gate, one.gate);
    copy(c.dy, one.dy);
    const Outcome<float> alone = run(context_, one);
    EXPECT_EQ(std::memcmp(alone.y.data.data(), &all.y(row, 0, 0), 200 * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(alone.dx.data.data(), &all.dx(row, 0, 0), 200 * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(alone.dgate.data.data(), &all.dgate(row, 0, 0), 200 * sizeof(float)), 0);
  }
}

// Groups that stand apart in longer rows, as heads in a projection do; in place; dx over dy.
TEST_P(NormTest, TakesStridesAndWorksInPlace) {
  Call c(40, 3, 17, true, false);
  const Outcome<float> expected = run(context_, c);
  Array<float> wide({40, 3, 25}), d_wide({40, 3, 25});
  std::fill(wide.data.begin(), wide.data.end(), kNaN);
  std::fill(d_wide.data.begin(), d_wide.data.end(), kNaN);
  for (std::int64_t n = 0; n < 40; ++n) {
    for (std::int64_t h = 0; h < 3; ++h) {
      std::copy_n(&c.x(n, h, 0), 17, &wide(n, h, 0));
      std::copy_n(&c.dy(n, h, 0), 17, &d_wide(n, h, 0));
    }
  }
  const View<float, 3> x(wide.data.data(), {40, 3, 17}, {75, 25, 1});
  const View<float, 3> dy(d_wide.data.data(), {40, 3, 17}, {75, 25, 1});
  Array<float> dweight({17});
  rms_norm_backward(context_, x, c.weight.data.data(), {}, expected.rstd.data.data(), dy, dy, {},
                    dweight.data.data());
  rms_norm(context_, x, c.weight.data.data(), kEps, {}, x, nullptr);
  EXPECT_TRUE(same_bits(dweight, expected.dweight));
  for (std::int64_t n = 0; n < 40; ++n) {
    for (std::int64_t h = 0; h < 3; ++h) {
      for (std::int64_t i = 0; i < 25; ++i) {
        if (i < 17) {
          EXPECT_EQ(wide(n, h, i), expected.y(n, h, i));
          EXPECT_EQ(d_wide(n, h, i), expected.dx(n, h, i));
        } else {
          EXPECT_TRUE(std::isnan(wide(n, h, i)) && std::isnan(d_wide(n, h, i)));
        }
      }
    }
  }
}

TEST_P(NormTest, WeightGradientIsAddedOn) {
  const Call c(10, 1, 20, true, false);
  const Outcome<float> expected = run(context_, c);
  Array<float> dweight({20}), dx = Array<float>::like(c.x);
  std::fill(dweight.data.begin(), dweight.data.end(), 3.0f);
  rms_norm_backward(context_, view(c.x.data.data(), c.x), c.weight.data.data(), {},
                    expected.rstd.data.data(), view(c.dy.data.data(), c.dy),
                    view(dx.data.data(), dx), {}, dweight.data.data());
  for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(dweight(i), 3.0f + expected.dweight(i));
}

TEST_P(NormTest, NaNFillsItsGroupAlone) {
  Call c(20, 2, 33, true, true);
  c.x(7, 1, 32) = kNaN;
  const Outcome<float> r = run(context_, c);
  for (std::int64_t n = 0; n < 20; ++n) {
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t i = 0; i < 33; ++i) {
        EXPECT_EQ(std::isnan(r.y(n, h, i)), n == 7 && h == 1);
        EXPECT_EQ(std::isnan(r.dx(n, h, i)), n == 7 && h == 1);
      }
    }
  }
}

TEST_P(NormTest, RefusesWrongShapes) {
  const Call c(4, 2, 8, true, true);
  Array<float> y({4, 2, 7});
  EXPECT_THROW(rms_norm(context_, view(c.x.data.data(), c.x), nullptr, kEps, {},
                        view(y.data.data(), y), nullptr),
               Error);
}

INSTANTIATE_TEST_SUITE_P(EachIsa, NormTest, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace ouzel::test
