// RMSNorm and its gradients against float64, and its promises bit for bit.
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/ops/norm.h"
#include "src/ops/operator_call.h"
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
  RmsNormOptions options;
  Array<float> x, weight, gate, dy;

  Call(std::int64_t rows, std::int64_t groups, std::int64_t size, bool has_weight, bool has_gate,
       const RmsNormOptions& more = {})
      : rows(rows),
        groups(groups),
        size(size),
        has_weight(has_weight),
        has_gate(has_gate),
        options(more) {
    options.eps = kEps;
    Random random(7);
    x = random_array<float>(random, {rows, groups, size}, -2, 2);
    dy = random_array<float>(random, {rows, groups, size});
    gate = random_array<float>(random, {rows, groups, size}, -4, 4);
    weight = random_array<float>(random, {weights(), size}, 0.5, 1.5);
  }
  std::int64_t weights() const { return options.weight_per_group ? groups : 1; }
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
  r.dweight = Array<float>({c.weights(), c.size});
  const auto in = [](const Array<float>& a) { return view(a.data.data(), a); };
  const View<const float, 3> gate = c.has_gate ? in(c.gate) : View<const float, 3>();
  const float* weight = c.has_weight ? c.weight.data.data() : nullptr;
  rms_norm(context, c.options, in(c.x), weight, gate, view(r.y.data.data(), r.y),
           r.rstd.data.data());
  rms_norm_backward(context, c.options, in(c.x), weight, gate, r.rstd.data.data(), in(c.dy),
                    view(r.dx.data.data(), r.dx),
                    c.has_gate ? view(r.dgate.data.data(), r.dgate) : View<float, 3>(),
                    r.dweight.data.data());
  return r;
}

// y_i = u_i r f_i with r = (mean(u^2) + eps)^-1/2; u = x and f = w a(g), or u = x a(g) and f = w;
// dr / du_k = -r^3 u_k / D.
Outcome<double> truth(const Call& c) {
  Outcome<double> t;
  const std::vector<std::int64_t> shape{c.rows, c.groups, c.size};
  t.y = Array<double>(shape);
  t.dx = Array<double>(shape);
  if (c.has_gate) t.dgate = Array<double>(shape);
  t.rstd = Array<double>({c.rows, c.groups});
  t.dweight = Array<double>({c.weights(), c.size});
  const bool first = c.has_gate && c.options.gate_first, last = c.has_gate && !first;
  for (std::int64_t n = 0; n < c.rows; ++n) {
    for (std::int64_t h = 0; h < c.groups; ++h) {
      const std::int64_t own = c.options.weight_per_group ? h : 0;
      const auto weight = [&](std::int64_t i) {
        return c.has_weight ? static_cast<double>(c.weight(own, i)) : 1;
      };
      const auto sigmoid = [&](std::int64_t i) {
        return 1 / (1 + std::exp(-static_cast<double>(c.gate(n, h, i))));
      };
      const bool silu = c.options.activation == GateActivation::kSilu;
      const auto act = [&](std::int64_t i) { return sigmoid(i) * (silu ? c.gate(n, h, i) : 1); };
      const auto slope = [&](std::int64_t i) {
        const double s = sigmoid(i);
        return silu ? s + c.gate(n, h, i) * s * (1 - s) : s * (1 - s);
      };
      const auto u = [&](std::int64_t i) { return c.x(n, h, i) * (first ? act(i) : 1); };
      double mean = 0, sum = 0;
      for (std::int64_t i = 0; i < c.size; ++i) mean += u(i) * u(i);
      const double r = 1 / std::sqrt(mean / static_cast<double>(c.size) + kEps);
      t.rstd(n, h) = r;
      for (std::int64_t i = 0; i < c.size; ++i) {
        const double a = last ? act(i) : 1, dy = c.dy(n, h, i);
        t.y(n, h, i) = u(i) * r * weight(i) * a;
        sum += dy * u(i) * weight(i) * a;
        if (c.has_weight) t.dweight(own, i) += dy * u(i) * r * a;
        if (last) t.dgate(n, h, i) = dy * u(i) * r * weight(i) * slope(i);
      }
      for (std::int64_t k = 0; k < c.size; ++k) {
        const double du = c.dy(n, h, k) * r * weight(k) * (last ? act(k) : 1) -
                          sum * std::pow(r, 3.0) * u(k) / static_cast<double>(c.size);
        t.dx(n, h, k) = du * (first ? act(k) : 1);
        if (first) t.dgate(n, h, k) = du * c.x(n, h, k) * slope(k);
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
      for (int variant = 0; variant < 32; ++variant) {
        RmsNormOptions options;
        options.activation = variant & 1 ? GateActivation::kSigmoid : GateActivation::kSilu;
        options.gate_first = (variant & 2) != 0;
        options.weight_per_group = (variant & 4) != 0;
        const Call c(rows, rows == 3 ? 5 : 1, size, (variant & 8) == 0, (variant & 16) == 0,
                     options);
        SCOPED_TRACE(testing::Message() << rows << " rows of " << size << ", variant " << variant);
        const Outcome<float> got = run(context_, c);
        const Outcome<double> expected = truth(c);
        Comparison comparison;
        comparison.output("y", got.y, expected.y);
        comparison.output("rstd", got.rstd, expected.rstd);
        // One feature alone is its own norm: the gradient is eps over x^3, a difference of equals.
        if (size > 1) comparison.gradient("dx", got.dx, expected.dx);
        comparison.gradient("dweight", got.dweight, expected.dweight);
        if (c.has_gate && (size > 1 || !options.gate_first)) {
          comparison.gradient("dgate", got.dgate, expected.dgate);
        }
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
  rms_norm_backward(context_, c.options, x, c.weight.data.data(), {}, expected.rstd.data.data(), dy,
                    dy, {}, dweight.data.data());
  rms_norm(context_, c.options, x, c.weight.data.data(), {}, x, nullptr);
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
  rms_norm_backward(context_, c.options, view(c.x.data.data(), c.x), c.weight.data.data(), {},
                    expected.rstd.data.data(), view(c.dy.data.data(), c.dy),
                    view(dx.data.data(), dx), {}, dweight.data.data());
  for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(dweight(i), 3.0f + expected.dweight(0, i));
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
  EXPECT_THROW(rms_norm(context_, c.options, view(c.x.data.data(), c.x), nullptr, {},
                        view(y.data.data(), y), nullptr),
               Error);
}

// Of the table: batches apart from each other and weights in longer rows, as one dense array.
TEST_P(NormTest, RowOfTheTableTakesAnyStrides) {
  RmsNormOptions options;
  options.activation = GateActivation::kSigmoid;
  options.gate_first = options.weight_per_group = true;
  const Call c(2 * 3, 2, 17, true, true, options);
  const Outcome<float> expected = run(context_, c);
  Array<float> x({2, 5, 2, 17}), weight({2, 20});
  for (std::int64_t n = 0; n < 6; ++n) {
    std::copy_n(&c.x(n, 0, 0), 34, &x(n / 3, n % 3, 0, 0));
  }
  for (std::int64_t h = 0; h < 2; ++h) std::copy_n(&c.weight(h, 0), 17, &weight(h, 0));
  const std::array<std::int64_t, 4> shape{2, 3, 2, 17};
  const std::map<std::string, ConstTensor> tensors = {
      {"x", View<const float, 4>(x.data.data(), shape, {170, 34, 17, 1})},
      {"weight", View<const float, 2>(weight.data.data(), {2, 17}, {20, 1})},
      {"gate", View<const float, 4>(c.gate.data.data(), shape)},
      {"do", View<const float, 4>(c.dy.data.data(), shape)}};
  const OperatorInfo& info = find_operator("rms_norm");
  const Attributes attributes(info,
                              {{"eps", "1e-5"}, {"activation", "sigmoid"}, {"gate_first", "true"}});
  const std::map<std::string, const Array<float>*> wanted = {{"o", &expected.y},
                                                             {"dx", &expected.dx},
                                                             {"dweight", &expected.dweight},
                                                             {"dgate", &expected.dgate}};
  for (const NamedArray& got : run_operator(context_, info, attributes, tensors, true)) {
    const Array<float>& own = *wanted.at(got.name);
    ASSERT_EQ(static_cast<std::size_t>(got.array.tensor.size()), own.data.size()) << got.name;
    const bool batches_apart = got.name == "dweight";  // another order of summing
    for (std::size_t i = 0; i < own.data.size(); ++i) {
      EXPECT_NEAR(got.array.memory.f32()[i], own.data[i], batches_apart ? 1e-5 : 0) << got.name;
    }
  }
  // A gradient alone.
  OperatorCall call(info, attributes, tensors, true);
  Array<float> dweight({2, 17});
  call.put("dweight", Tensor(View<float, 2>(dweight.data.data(), {2, 17})));
  call.run(context_);
  for (std::size_t i = 0; i < dweight.data.size(); ++i) {
    EXPECT_NEAR(dweight.data[i], expected.dweight.data[i], 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(EachIsa, NormTest, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace ouzel::test
