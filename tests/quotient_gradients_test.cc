// Gradients through the normaliser where the denominator is small: o hardly depends on the only
// feature of q, and dq = scale (do S - (do o) z) / den is what is left of two large terms, which
// are the yardstick (docs/numerics.md); and where values are far from what outputs have in common.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/linear_attention.h"
#include "src/base/bounds.h"
#include "src/base/random.h"
#include "tests/cases.h"
#include "tests/contexts.h"

namespace ouzel {
namespace {

constexpr std::int64_t kTokens = 100, kValues = 5;
constexpr double kEps = 1e-6;  // of relu

struct Problem {
  explicit Problem(double size) : q(kTokens), k(kTokens), v(kTokens * kValues), up(v.size()) {
    Random random(29);
    const auto fill = [&](std::vector<float>& list, double low, double high) {
      for (float& x : list) x = static_cast<float>(low + (high - low) * random.uniform());
    };
    fill(q, size / 2, size);
    fill(k, 0.5, 1.5);
    fill(v, -1, 1);
    fill(up, -1, 1);
  }
  std::vector<float> q, k, v, up;
};

struct Errors {
  double dq = 0, terms = 0, dv = 0, dv_truth = 0;  // sums of squares
};

Errors errors(const Problem& p, const std::vector<float>& dq, const std::vector<float>& dv) {
  Errors e;
  std::vector<double> s(kValues), factor(kTokens);
  double z = 0;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const auto q = static_cast<double>(p.q[at]), k = static_cast<double>(p.k[at]);
    z += k;
    const double den = q * z + kEps;
    factor[at] = q / den;
    double sum = 0;
    for (std::size_t j = 0; j < kValues; ++j) {
      s[j] += k * static_cast<double>(p.v[at * kValues + j]);
      const auto up = static_cast<double>(p.up[at * kValues + j]);
      sum += up * s[j] * kEps / (den * den);  // do S / den - (do o) z / den
      e.terms += up * s[j] / den * up * s[j] / den;
    }
    e.dq += std::pow(static_cast<double>(dq[at]) - sum, 2);
  }
  for (std::size_t j = 0; j < kValues; ++j) {
    double sum = 0;  // of what later outputs make of this value
    for (std::size_t at = kTokens; at-- > 0;) {
      sum += factor[at] * static_cast<double>(p.up[at * kValues + j]);
      const double truth = static_cast<double>(p.k[at]) * sum;
      e.dv_truth += truth * truth;
      e.dv += std::pow(static_cast<double>(dv[at * kValues + j]) - truth, 2);
    }
  }
  return e;
}

TEST(QuotientGradients, SmallDenominatorsCostNoMoreThanTheirTerms) {
  for (Isa isa : supported_isas()) {
    for (double size : {1.0, 1e-2, 1e-4, 1e-6}) {
      SCOPED_TRACE(size);
      Context context({.threads = 1, .isa = isa, .poison_scratch = true});
      Problem p(size);
      std::vector<float> dq(p.q.size()), dk(p.k.size()), dv(p.v.size());
      const auto keyed = [](std::vector<float>& x) {
        return Tensor(x.data(), DType::kF32, {1, kTokens, 1, 1});
      };
      const auto valued = [](std::vector<float>& x) {
        return Tensor(x.data(), DType::kF32, {1, kTokens, 1, kValues});
      };
      LinearAttentionOptions options;
      options.feature_map.kind = FeatureMapKind::kRelu;
      options.normalize = true;
      options.scale = 1;
      options.eps = kEps;
      RecurrenceInputs inputs;
      inputs.q = keyed(p.q);
      inputs.k = keyed(p.k);
      inputs.v = valued(p.v);
      RecurrenceInputGrads grads;
      grads.q = keyed(dq);
      grads.k = keyed(dk);
      grads.v = valued(dv);
      linear_attention_backward(context, options, inputs, nullptr, {.o = valued(p.up)}, grads,
                                nullptr);
      const Errors e = errors(p, dq, dv);
      const double bound = bounds_on(isa, kFloat32).gradient;
      EXPECT_LE(std::sqrt(e.dq), bound * std::sqrt(e.terms));
      EXPECT_LE(std::sqrt(e.dv), bound * std::sqrt(e.dv_truth));
    }
  }
}

// Without causality each output is nearly the mean of all values, from which the first may be far.
TEST(QuotientGradients, AFirstValueFarFromTheMeanCostsNothing) {
  using namespace test;
  LawCase c{Law::kElu1Normalized, 1000, 24, 3};
  c.layout = Layout::kPacked;
  c.heads = Heads::kMoreValues;
  c.direction = Direction::kNoncausal;
  Call call = make_call(c, 47);
  Doubles& v = std::get<Recurrence>(call.arguments).v;
  const Segments& segments = std::get<Recurrence>(call.arguments).segments;
  for (const Segment& s : segments.list) {
    const std::int64_t row = v.extent(2) * v.extent(3);
    for (std::int64_t i = 0; s.length > 1 && i < row; ++i) {
      v.data[static_cast<std::size_t>(s.begin * row + i)] += 30;
    }
  }
  const Results<double> truth = run_reference(call);
  for (Context& context : contexts()) {
    SCOPED_TRACE(name_of(context.isa()));
    expect_within(run(context, call), truth, bounds_on(context.isa(), kFloat32));
  }
}

}  // namespace
}  // namespace ouzel
