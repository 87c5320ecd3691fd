// Toy examples worked out by hand, through the public API.
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/ouzel.h"

namespace ouzel {
namespace {

constexpr std::int64_t kTokens = 3;

using Values = std::vector<float>;

// One head of `tokens` tokens: q and k of `keys` numbers a token, v of `values`.
Values linear(const LinearAttentionOptions& options, const Values& q, const Values& k,
              const Values& v, std::int64_t tokens, std::int64_t keys, std::int64_t values) {
  Context context;
  Values o(v.size());
  RecurrenceInputs inputs;
  inputs.q = ConstTensor(q.data(), std::array{std::int64_t{1}, tokens, std::int64_t{1}, keys});
  inputs.k = ConstTensor(k.data(), std::array{std::int64_t{1}, tokens, std::int64_t{1}, keys});
  inputs.v = ConstTensor(v.data(), std::array{std::int64_t{1}, tokens, std::int64_t{1}, values});
  RecurrenceOutputs outputs;
  outputs.o = Tensor(o.data(), std::array{std::int64_t{1}, tokens, std::int64_t{1}, values});
  linear_attention(context, options, inputs, outputs);
  return o;
}

void expect_near(const Values& a, const Values& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << i;
}

// elu(x) + 1 turns the queries into (1, 2), (1/2, 1), (2, 1/2) and the keys into (2, 1), (1, 1/2),
// (3, 2):
//
//   t   S_t                   z_t        numerator                          denominator
//   1   (20, 10)              (2, 1)     1*20 + 2*10 = 40                   1*2 + 2*1 = 4
//   2   (20+20, 10+10)        (3, 1.5)   40/2 + 20 = 40                     3/2 + 1.5 = 3
//   3   (40-90, 20-60)        (6, 3.5)   2*(-50) + (-40)/2 = -120           2*6 + 3.5/2 = 13.75
//
// Non-causal, every query reads S_3 and z_3: (-50 - 80) / (6 + 7), (-25 - 40) / (3 + 3.5), -120
// / 13.75.
TEST(Published, Elu1AttentionOfThreeTokens) {
  const float minus_ln_2 = -0.69314718f;
  const Values q{0, 1, minus_ln_2, 0, 1, minus_ln_2};
  const Values k{1, 0, 0, minus_ln_2, 2, 1};
  const Values v{10, 20, -30};
  LinearAttentionOptions options;
  options.feature_map.kind = FeatureMapKind::kElu1;
  options.normalize = true;
  expect_near(linear(options, q, k, v, kTokens, 2, 1), {10, 13.333333f, -8.7272727f}, 1e-5);
  options.causal = false;
  expect_near(linear(options, q, k, v, kTokens, 2, 1), {-10, -10, -8.7272727f}, 1e-5);
  options.causal = true;
  options.reverse = true;  // S starts from the third token
  expect_near(
      linear(options, q, k, v, kTokens, 2, 1),
      {-10, (0.5f * -70 - 50) / (0.5f * 4 + 2.5f), (2 * -90 - 0.5f * 60) / (2 * 3 + 0.5f * 2)},
      1e-5);
}

// softmax(Q K^T) V is not Q (K^T V): with Q = (1, 2), K = (1, 0), V = (1, 0) the first is (e / (e +
// 1), e^2 / (e^2 + 1)), the second (1, 2).
TEST(Published, SoftmaxAttentionDoesNotFactor) {
  const Values q{1, 2}, k{1, 0}, v{1, 0};
  LinearAttentionOptions linear_options;
  linear_options.causal = false;
  linear_options.scale = 1;
  expect_near(linear(linear_options, q, k, v, 2, 1, 1), {1, 2}, 1e-6);

  Context context;
  SoftmaxAttentionOptions options;
  options.causal = false;
  options.scale = 1;
  const std::array<std::int64_t, 4> shape{1, 2, 1, 1};
  SoftmaxAttentionInputs inputs;
  inputs.q = ConstTensor(q.data(), shape);
  inputs.k = ConstTensor(k.data(), shape);
  inputs.v = ConstTensor(v.data(), shape);
  Values o(2);
  SoftmaxAttentionOutputs outputs;
  outputs.o = Tensor(o.data(), shape);
  softmax_attention(context, options, inputs, outputs);
  expect_near(o, {0.73105858f, 0.88079708f}, 1e-6);
}

// Scaling attention (arXiv:1812.01243): (Q K^T / n) V = (Q / sqrt n) ((K / sqrt n)^T V).
TEST(Published, ScalingAttentionFactors) {
  constexpr std::int64_t n = 7, keys = 5, values = 3;
  Values q, k, v;
  for (int i = 0; i < n * keys; ++i) {
    q.push_back(static_cast<float>(std::sin(1.0 + i)));
    k.push_back(static_cast<float>(std::cos(2.0 * i)));
  }
  for (int i = 0; i < n * values; ++i) v.push_back(static_cast<float>(std::sin(3.0 * i)));
  // The left side as it is written: weights first.
  Values left(v.size());
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      double weight = 0;
      for (int c = 0; c < keys; ++c) weight += double{q[i * keys + c]} * k[j * keys + c];
      for (int c = 0; c < values; ++c) {
        left[i * values + c] += static_cast<float>(weight / n * v[j * values + c]);
      }
    }
  }
  LinearAttentionOptions options;
  options.causal = false;
  options.scale = 1.0 / n;
  expect_near(linear(options, q, k, v, n, keys, values), left, 1e-6);
  for (float& x : q) x /= std::sqrt(static_cast<float>(n));
  for (float& x : k) x /= std::sqrt(static_cast<float>(n));
  options.scale = 1;
  expect_near(linear(options, q, k, v, n, keys, values), left, 1e-6);
}

}  // namespace
}  // namespace ouzel
